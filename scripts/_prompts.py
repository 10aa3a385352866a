"""The texts that a command is asked to continue or to answer: their options, and what these hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.tokenizer import Tokenizer
from scripts._cli import UsageError


@dataclass(frozen=True)
class Asked:
    """A text of the command line: to answer as a user's message, or to continue."""

    text: str
    chat: bool


@dataclass(frozen=True)
class Prompt:
    """One prompt as given, as tokens, and whether the output continues it or answers it."""

    text: str
    tokens: list[int]
    continues: bool


class _Ask(argparse.Action):
    """Keeps the options that ask for texts in one list, in the order of the command line: ``asked``."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        namespace.asked = [*namespace.asked, (self.option_strings[0], value)]


def add_prompt_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """--prompt, --chat, --system and --prompts-file, in the group that is returned."""
    group = parser.add_argument_group("prompts (at least one; options may be repeated; answered in the order given)")
    parser.set_defaults(asked=[])
    group.add_argument("--prompt", action=_Ask, metavar="TEXT", help="text to continue")
    group.add_argument(
        "--chat",
        action=_Ask,
        metavar="TEXT",
        help="a user's message, in the model's chat template",
    )
    group.add_argument("--system", metavar="TEXT", help="system message for every --chat")
    group.add_argument(
        "--prompts-file",
        action=_Ask,
        metavar="PATH",
        help="texts to continue, one a line, in UTF-8; - is standard input",
    )
    return group


def asked_texts(args: argparse.Namespace) -> list[Asked]:
    """Every text, in the order of the command line; those of a file stand where its option does."""
    names = [option for option, _ in args.asked]
    if args.system is not None and "--chat" not in names:
        raise UsageError("--system goes with --chat: a plain --prompt has no system message")
    if names.count("--prompts-file") > 1:
        raise UsageError("--prompts-file is given more than once; put all texts in one file")
    found = []
    for option, value in args.asked:
        texts = _lines(value) if option == "--prompts-file" else [value]
        found += [Asked(text, chat=option == "--chat") for text in texts]
    if not found:
        raise UsageError('nothing to do: give --chat "a message", --prompt "a text", or --prompts-file PATH')
    return found


def _lines(path: str) -> list[str]:
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read --prompts-file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--prompts-file {path} is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        ) from None
    # Not str.splitlines, which also cuts at characters that a prompt may hold, such as U+2028.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise UsageError(f"--prompts-file {path} holds no prompt: it is empty, or blank lines")
    return lines


def encoded(asked: Sequence[Asked], system: str | None, tokenizer: Tokenizer) -> list[Prompt]:
    """Every text as tokens."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [
        Prompt(one.text, tokenizer.encode_chat([*first, {"role": "user", "content": one.text}]), continues=False)
        if one.chat
        else Prompt(one.text, tokenizer.encode(one.text), continues=True)
        for one in asked
    ]
