"""Rebuilds a SentencePiece-style BPE tokenizer (GGUF's tokenizer model "llama").

SentencePiece merges the neighbouring pair whose joint piece scores highest. The `tokenizers` library merges
by rank, so every way to cut a piece into two pieces becomes a merge, ranked by the piece's score. Blanks are
spelled U+2581, a text gets one in front, and characters outside the vocabulary become one token per byte.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from model.tokenizer.errors import TokenizerError
from model.tokenizer.gguf_vocabulary import GgufVocabulary, TokenType, require

BLANK = "\u2581"


def build_sentencepiece(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Backend:
    """The tokenizer, still without its special tokens. Raises TokenizerError."""
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise TokenizerError(
            "tokenizer.ggml.remove_extra_whitespaces is true, which is not supported; Llama vocabularies keep blanks"
        )
    scores = require(metadata, "tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens):
        raise TokenizerError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens; they must agree"
        )
    missing = [name for byte in range(256) if (name := f"<0x{byte:02X}>") not in vocabulary.ids]
    if missing:
        raise TokenizerError(
            f"the vocabulary lacks {len(missing)} of the 256 byte tokens ({missing[0]} first), so it cannot "
            "spell every text; use the model's Hugging Face folder with its tokenizer.json instead"
        )
    unknown = vocabulary.roles.get("unk_token")
    backend = Backend(
        models.BPE(
            vocab=dict(vocabulary.ids),
            merges=rebuild_merges(vocabulary, scores),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixes_blank = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spell_blanks = [normalizers.Prepend(BLANK)] if prefixes_blank else []
    backend.normalizer = normalizers.Sequence([*spell_blanks, normalizers.Replace(" ", BLANK)])
    read_blanks = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes_blank:
        read_blanks.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(read_blanks)
    return backend


def rebuild_merges(vocabulary: GgufVocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Merges, best first: by score, then by the longer left part, then in vocabulary order.

    Only normal and unused pieces take part: the others are never made from characters.
    """
    pieces = {
        token: scores[token_id]
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]
