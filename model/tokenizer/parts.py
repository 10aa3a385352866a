"""What a loader hands over: everything about a tokenizer that its files declare."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend


@dataclass(frozen=True)
class TokenizerParts:
    """A loaded tokenizer.

    backend: the `tokenizers` object; its added tokens tell which ids are special.
    special_tokens: texts by role ("bos_token", "eos_token", ...), as chat templates see them.
    prefix_ids: ids put before a text that is encoded with special tokens: as a rule BOS or nothing.
    declared_stop_ids: ids that the model's files say end a generation, in order of mention.
    chat_template: jinja2 source, or None when the model has none.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    prefix_ids: tuple[int, ...]
    declared_stop_ids: tuple[int, ...]
    chat_template: str | None
