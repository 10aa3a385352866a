"""Turns what `--model` was given into a model that can be loaded: config, tokenizer and weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from model.checkpoint.demo import fetch_demo
from model.checkpoint.errors import CheckpointError
from model.checkpoint.gguf import GgufSource
from model.checkpoint.hub import fetch_from_hub
from model.checkpoint.json_file import read_object
from model.checkpoint.load import load_params
from model.checkpoint.orbax import restore_params
from model.checkpoint.orbax_folder import is_interrupted, is_orbax, read_info
from model.checkpoint.packed import open_packed
from model.checkpoint.progress import ProgressOption
from model.checkpoint.safetensors import SafetensorsSource
from model.checkpoint.source import TensorSource
from model.checkpoint.stored import stored_quantization
from model.checkpoint.table import Path as ParameterPath
from model.config import LlamaConfig
from model.llama import LayersForm
from model.presets import PRESETS
from model.quantize import WIDE, Quantization, QuantizationError
from model.tokenizer import Tokenizer
from sharding.layout import Layout

DEMO = "demo"
ACCEPTED = (
    "'demo', a Hugging Face folder, a .gguf file, an Orbax checkpoint folder, or a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct"
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ResolvedModel:
    """A checkpoint that was found and whose headers were read.

    `name` is what was asked for, `path` the file or folder it stands for. `source` has the tensors, save for
    an Orbax checkpoint, which is restored by Orbax.
    """

    name: str
    kind: Literal["huggingface", "gguf", "orbax"]
    path: Path
    config: LlamaConfig
    source: TensorSource | None

    def load_tokenizer(self) -> Tokenizer:
        """Raises TokenizerError when the checkpoint comes without a usable one."""
        if isinstance(self.source, GgufSource):
            return Tokenizer.from_gguf(self.source.metadata)
        return Tokenizer.from_folder(self.path)

    def load_params(
        self,
        layout: Layout,
        dtype: Any,
        layers: LayersForm = "unrolled",
        progress: ProgressOption = True,
        quantization: Quantization = WIDE,
    ) -> dict[ParameterPath, jax.Array]:
        """Every parameter on its devices; see `model.checkpoint.load` and `model.checkpoint.orbax`."""
        if self.source is None:
            return restore_params(self.path, layout, dtype, layers, progress, quantization)
        return load_params(self.source, self.config, layout, dtype, layers, progress, quantization)

    def quantization_for(self, asked: Quantization) -> Quantization:
        """How the weights are kept when loaded as ``asked``: an Orbax checkpoint's stay as they were saved."""
        return read_info(self.path).quantization if self.source is None and asked == WIDE else asked

    def stored_quantization(self) -> Quantization:
        """What keeps every matrix as the checkpoint stores it.

        Raises QuantizationError when it stores nothing in few bits.
        """
        if self.source is not None:
            return stored_quantization(self.source, self.config)
        stored = read_info(self.path).quantization
        if stored == WIDE:
            raise QuantizationError(f"{self.path} keeps no matrix in fewer than 16 bits")
        return stored

    def generation_files(self) -> dict[str, bytes]:
        """The checkpoint's own `generation_config.json`, if it has one: name -> content."""
        file = self.path / _GENERATION_CONFIG
        return {file.name: file.read_bytes()} if self.path.is_dir() and file.is_file() else {}


def open_model(name: str) -> ResolvedModel:
    """Finds the checkpoint that `name` stands for, fetching it if it must, and reads its headers.

    Raises CheckpointError when there is none or it is damaged, and ConfigError when it is not a plain Llama.
    """
    if name == DEMO:
        return _open_gguf(name, fetch_demo())
    path = Path(name).expanduser()
    if name and path.exists():
        return _open_folder(name, path) if path.is_dir() else _open_file(name, path)
    if name.lower() in PRESETS:
        raise CheckpointError(f"{name!r} is a preset: the shape of a model, without weights. --model takes {ACCEPTED}")
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise CheckpointError(f"there is no file or folder {name!r} here. --model takes {ACCEPTED}")
    return _open_folder(name, fetch_from_hub(name))


def _open_file(name: str, path: Path) -> ResolvedModel:
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        raise CheckpointError(f"{name} is one file of a model: pass its folder, which also holds config.json")
    return _open_gguf(name, path)


def _open_gguf(name: str, path: Path) -> ResolvedModel:
    source = GgufSource(path)
    config = LlamaConfig.from_gguf(source.metadata, tensor_names=source.stored_names, rope_freqs=source.rope_freqs())
    return ResolvedModel(name, "gguf", path, config, source)


def _open_folder(name: str, path: Path) -> ResolvedModel:
    if is_orbax(path):
        return ResolvedModel(name, "orbax", path, read_info(path).config, None)
    if is_interrupted(path):
        raise CheckpointError(f"{path} was left by a save that was interrupted: save it again")
    config_file = path / "config.json"
    if not config_file.is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"It holds {', '.join(ggufs[:5])}: pass one of these files" if ggufs else f"--model takes {ACCEPTED}"
        raise CheckpointError(f"{path} is not a model folder: it has no config.json. {hint}")
    generation_file = path / _GENERATION_CONFIG
    generation = read_object(generation_file) if generation_file.is_file() else None
    stated = read_object(config_file)
    packing = stated.pop("quantization_config", None)
    if packing is not None and not isinstance(packing, dict):
        raise CheckpointError(f"{config_file}: quantization_config is {packing!r}; it must be an object or null")
    config = LlamaConfig.from_hf(stated, generation)
    source = open_packed(path, packing) if packing else SafetensorsSource(path)
    return ResolvedModel(name, "huggingface", path, config, source)
