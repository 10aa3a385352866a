"""Which tokens end a generation."""

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend

# End-of-turn and end-of-text marks in common use. Model files often declare only one of the several that a
# model emits, and a generation that misses one runs on.
END_MARKS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "</s>",
)


def stop_token_ids(backend: Backend, declared: Iterable[int]) -> tuple[int, ...]:
    """The declared ids, then those of the well-known marks that the vocabulary holds as special tokens."""
    added = backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    marks = (special[mark] for mark in END_MARKS if mark in special)
    return tuple(dict.fromkeys((*declared, *marks)))
