"""Models and decoders for the tests, and one call that runs a batch to its end."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from decode.decoder import Decoder
from decode.sampling import SamplingParams
from model.checkpoint.resolve import ResolvedModel, open_model
from model.config import LlamaConfig
from model.llama import LayersForm
from sharding.collectives import DEFAULT_COLLECTIVES, Collectives
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.golden.cases import CASES, DEMO, RANDOM_MODELS, write_case
from tests.model.checkpoint_files import tensor_shapes, write_hf


class Row(NamedTuple):
    """What a row of a batch generated."""

    tokens: list[int]
    logprobs: list[float]


@functools.cache
def golden_random() -> dict[str, Any]:
    return json.loads(RANDOM_MODELS.read_text())["cases"]


@functools.cache
def golden_demo() -> dict[str, Any]:
    return json.loads(DEMO.read_text())


@functools.cache
def demo_model() -> ResolvedModel:
    return open_model("demo")


@functools.cache
def demo_decoder() -> Decoder:
    """The demo model as users run it: float32, one device, unrolled. Compiled programs stay with it."""
    return make_decoder(demo_model())


@functools.cache
def golden_model(name: str) -> ResolvedModel:
    """A random model of the golden files, from a folder with the `config.json` that transformers wrote."""
    return open_model(str(write_case(_folder(name), CASES[name], golden_random()[name]["config"])))


@functools.cache
def small_model(config: LlamaConfig) -> ResolvedModel:
    return open_model(str(write_hf(_folder("small"), config, small_tensors(config))))


@functools.cache
def small_tensors(config: LlamaConfig) -> Mapping[str, np.ndarray]:
    """Random weights that keep activations near 1 and make attention choose. Norms and biases are not trivial."""
    rng = np.random.default_rng(7)
    found = {}
    for name, shape in tensor_shapes(config).items():
        value = rng.standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * value
        elif name.endswith(".bias"):
            value = 0.3 * value
        else:
            value = (1.7 if "q_proj" in name or "k_proj" in name else 1.0) * value / np.float32(shape[-1]) ** 0.5
        found[name] = value.astype(np.float32)
    return found


def make_decoder(
    model: ResolvedModel,
    tp: int = 1,
    *,
    data: int = 1,
    layers: LayersForm = "unrolled",
    dtype: str = "float32",
    collectives: Collectives = DEFAULT_COLLECTIVES,
    **options: Any,
) -> Decoder:
    """A decoder of the model at a degree; options are those of ``Decoder``."""
    layout = Layout(make_mesh(tp, model.config.num_kv_heads, data=data))
    params = model.load_params(layout, dtype, layers, progress=False)
    return Decoder(model.config, params, layout, dtype, layers=layers, collectives=collectives, **options)


def run(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> list[Row]:
    """Generate to the end; options are those of `Decoder.generate`."""
    rows = [Row([], []) for _ in prompts]
    for arrival in decoder.generate(prompts, max_new_tokens=new_tokens, sampling=sampling, **options):
        for row, tokens, logprobs in zip(rows, arrival.tokens, arrival.logprobs, strict=True):
            row.tokens.extend(tokens)
            row.logprobs.extend(logprobs)
    return rows


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def some_tokens(config: LlamaConfig, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()


def _folder(name: str) -> Path:
    """A new scratch folder, removed when the process ends."""
    keeper = tempfile.TemporaryDirectory(prefix=f"{name}-")
    _KEPT.append(keeper)
    return Path(keeper.name) / name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
