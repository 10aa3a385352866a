"""A model small enough to run in a second, with a tokenizer of single bytes, and what it must answer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from decode.sampling import SamplingParams
from model.checkpoint.resolve import open_model
from model.config import LlamaConfig
from model.tokenizer.byte_alphabet import byte_characters
from tests.decode.running import make_decoder, run, small_tensors
from tests.model.checkpoint_files import small_config, write_hf
from tests.model.tokenizer_files import save_folder

BOS, EOS = 256, 257
CONFIG = small_config(vocab_size=258, bos_token_id=BOS, eos_token_ids=(EOS,), num_layers=1)
TEMPLATE = "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }};{% endfor %}"
BYTES = list(byte_characters())


def write_tiny(folder: Path, config: LlamaConfig = CONFIG, *, chat: bool = True, bos: bool = True) -> Path:
    """A Hugging Face folder. bos: put BOS before a text."""
    write_hf(folder, config, dict(small_tensors(config)))
    config_json = (folder / "config.json").read_bytes()
    files: dict[str, Any] = {
        "tokenizer_config": {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": bos},
    }
    save_folder(folder, **files, **({"chat_template": TEMPLATE} if chat else {}))
    (folder / "config.json").write_bytes(config_json)
    return folder


def poison(folder: Path, character: str) -> None:
    """Make the embedding of one of a ``write_tiny`` folder's tokens NaN."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][tokens_of(character, bos=False)] = np.nan
    save_file(weights, path)


def tokens_of(text: str, *, bos: bool = True) -> list[int]:
    """The token ids of a text, a byte each."""
    return [BOS] * bos + [BYTES.index(byte) for byte in text.encode()]


def text_of(tokens: list[int]) -> str:
    """The text of token ids; BOS and EOS have none."""
    return bytes(BYTES[token] for token in tokens if token < 256).decode("utf-8", "replace")


def answer(folder: Path, prompt: list[int], new_tokens: int, **sampling: Any) -> list[int]:
    """What the decoder generates for one prompt on one device, with no stop token."""
    return run(_decoder(folder), [prompt], new_tokens, SamplingParams(**sampling))[0].tokens


@functools.cache
def _decoder(folder: Path) -> Any:
    return make_decoder(open_model(str(folder)))
