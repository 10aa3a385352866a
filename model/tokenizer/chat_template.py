"""Renders a model's chat template, a jinja2 program that comes with the model.

The environment is what templates are written for: Hugging Face's, with its helpers and block trimming.
Templates are programs from elsewhere, so they run in a sandbox that also bounds what they make and for how long.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from model.tokenizer.errors import TokenizerError
from model.tokenizer.sandbox import MAX_CHARACTERS, Sandbox


class ChatTemplate:
    """A compiled template. Raises TokenizerError where `source` is not valid jinja2."""

    def __init__(self, source: str) -> None:
        self.source = source
        try:
            self._environment = _make_environment()
            self._template = self._environment.from_string(self._environment.counted(self._environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is invalid at line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The chat as text.

        messages: each with a "role" and, mostly, a "content"; keys with value None are left out.
        special_tokens: by role, as the template's variables `bos_token` and so on.
        variables: further ones that the template reads, such as `tools` or `date_string`.

        Raises TokenizerError with the template's own message where it refuses the chat, or fails on it.
        """
        context = {
            "tools": None,
            "documents": None,
            **special_tokens,
            **variables,
            "messages": _check_messages(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        self._environment.renew()
        parts, length = [], 0
        try:
            for part in self._template.generate(context):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise jinja2.TemplateRuntimeError(f"it wrote more than {MAX_CHARACTERS} characters")
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template refused the chat: {error.message or error}") from error
        except Exception as error:  # a template can fail as any program can
            raise TokenizerError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(parts)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not messages:
        raise TokenizerError('a chat is a non-empty list of messages such as {"role": "user", "content": "Hi"}')
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TokenizerError(f'chat message {index} is {message!r}; it must be an object with a "role"')
        # Chat services write null for an absent content or tool call, which templates would print as "None".
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; in rendering its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> Sandbox:
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    # jinja2's own filter escapes HTML, which no model was trained on.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.bound_filters()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
