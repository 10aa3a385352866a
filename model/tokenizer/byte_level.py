"""Rebuilds a byte-level BPE tokenizer (GGUF's tokenizer model "gpt2").

GGUF names the rule that splits text before merging (`tokenizer.ggml.pre`) and leaves the rule itself to the
reader, so the ones that Llama-shaped models use are written out here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from model.tokenizer.errors import TokenizerError
from model.tokenizer.gguf_vocabulary import GgufVocabulary, require

# Llama 3's published split: contractions in any case; letters with one leading other character; up to three
# digits; symbols with the line breaks after them; line breaks with the blanks before them; blanks but the
# last one before a word; any other blanks.
_LLAMA3_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# What llama.cpp applies to files whose converter did not know the model's own rule: GPT-2's split between a
# first pass that isolates punctuation and later ones that isolate digits, in threes.
_LLAMA_CPP_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True)
class PreTokenizer:
    """A splitting rule, and two habits that llama.cpp ties to it.

    ignore_merges: a split that is a token as it stands becomes that token without merging.
    adds_bos: BOS goes first unless the file says otherwise.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    isolate = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*isolate, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = PreTokenizer(lambda: _splits(_LLAMA3_SPLIT), ignore_merges=True, adds_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(_gpt2),
    "smollm": PreTokenizer(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "default": PreTokenizer(lambda: _splits(*_LLAMA_CPP_DEFAULT_SPLITS)),
}


def read_pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The splitting rule that `tokenizer.ggml.pre` names; TokenizerError listing the known ones otherwise."""
    name = require(metadata, "tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, whose splitting rule is not known here; known: "
            f"{', '.join(PRE_TOKENIZERS)}. Use the model's Hugging Face folder, with its tokenizer.json"
        )
    return PRE_TOKENIZERS[name]


def build_byte_level(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Backend:
    """The tokenizer, still without its special tokens. Raises TokenizerError."""
    pre_tokenizer = read_pre_tokenizer(metadata)
    merges = _read_merges(require(metadata, "tokenizer.ggml.merges"))
    try:
        model = models.BPE(vocab=dict(vocabulary.ids), merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    except Exception as error:  # the library has no narrower type
        raise TokenizerError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merges(lines: Sequence[str]) -> list[tuple[str, str]]:
    merges = []
    for index, line in enumerate(lines):
        left, blank, right = line.partition(" ")
        if not (left and blank and right):
            raise TokenizerError(f"tokenizer.ggml.merges[{index}] is {line!r}; expected two tokens and a blank")
        merges.append((left, right))
    return merges
