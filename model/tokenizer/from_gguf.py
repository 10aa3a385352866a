"""Rebuilds a tokenizer from GGUF metadata."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from model.tokenizer.byte_level import build_byte_level, read_pre_tokenizer
from model.tokenizer.errors import TokenizerError
from model.tokenizer.gguf_vocabulary import GgufVocabulary, TokenType, read_vocabulary, require
from model.tokenizer.parts import TokenizerParts
from model.tokenizer.sentencepiece import build_sentencepiece

_MODEL = "tokenizer.ggml.model"
_ENDS = ("eos_token", "eot_token", "eom_token")


def read_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """The tokenizer that `metadata` (key -> decoded Python value) describes, else TokenizerError."""
    kind = require(metadata, _MODEL)
    vocabulary = read_vocabulary(metadata)
    if kind == "gpt2":
        backend = build_byte_level(metadata, vocabulary)
        adds_bos = read_pre_tokenizer(metadata).adds_bos
    elif kind == "llama":
        backend = build_sentencepiece(metadata, vocabulary)
        adds_bos = True
    else:
        raise TokenizerError(f"{_MODEL} is {kind!r}; supported: 'gpt2' (byte-level BPE), 'llama' (SentencePiece)")
    _add_special_tokens(backend, vocabulary)
    prefix_ids = _read_prefix(metadata, vocabulary, adds_bos)
    if prefix_ids:
        _write_prefix(backend, vocabulary.tokens[prefix_ids[0]], prefix_ids[0])
    stop_ids = [vocabulary.roles[role] for role in _ENDS if role in vocabulary.roles]
    return TokenizerParts(
        backend=backend,
        special_tokens={role: vocabulary.tokens[token_id] for role, token_id in vocabulary.roles.items()},
        prefix_ids=prefix_ids,
        declared_stop_ids=tuple(dict.fromkeys(stop_ids)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _add_special_tokens(backend: Backend, vocabulary: GgufVocabulary) -> None:
    """Makes control tokens special and user-defined ones whole, so that a template's text encodes to them."""
    ends = {vocabulary.tokens[vocabulary.roles[role]] for role in ("bos_token", *_ENDS) if role in vocabulary.roles}
    special = ends | set(vocabulary.texts(TokenType.CONTROL, TokenType.UNKNOWN))
    ordered = [token for token in vocabulary.tokens if token in special and token]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ordered])
    whole = [token for token in vocabulary.texts(TokenType.USER_DEFINED) if token and token not in special]
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole])


def _read_prefix(metadata: Mapping[str, Any], vocabulary: GgufVocabulary, adds_bos: bool) -> tuple[int, ...]:
    """BOS, when the file asks for it; `adds_bos` stands in for a file that does not say, as in llama.cpp.

    An EOS after the text (`add_eos_token`) is left out: a prompt is there to be continued.
    """
    if not metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        return ()
    if "bos_token" not in vocabulary.roles:
        raise TokenizerError(
            "the GGUF metadata asks for a BOS token before each text but has no tokenizer.ggml.bos_token_id; "
            "convert the model again with a current converter"
        )
    return (vocabulary.roles["bos_token"],)


def _write_prefix(backend: Backend, token: str, token_id: int) -> None:
    """Has the backend add BOS as well, so that a saved tokenizer.json does so in other programs."""
    # The processor's template language gives a meaning to `$` and `:`, which a list of steps avoids.
    backend.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, token_id)]
    )
