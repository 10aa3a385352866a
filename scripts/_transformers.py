"""Hugging Face transformers as a peer to time beside ours: the same weights, one token at a time."""

from __future__ import annotations

import time

import numpy as np

from model.checkpoint.resolve import ResolvedModel
from scripts._cli import UsageError


def check_transformers(model: ResolvedModel) -> None:
    """Raises UsageError where the packages are missing, or where they cannot read this model."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(f"--beside transformers needs {error.name}: pip install -e '.[parity]'") from None
    if model.source is None:
        raise UsageError("transformers cannot read an Orbax checkpoint; give --model a folder or a .gguf file")


class TransformersChain:
    """A filled cache, and the same number of greedy steps from it for each sample."""

    def __init__(self, model: ResolvedModel, batch: int, context: int, steps: int, dtype: str = "float32"):
        check_transformers(model)
        import torch
        import transformers

        assert model.source is not None
        self.torch, self.steps, self.context = torch, steps, context
        self.name = f"transformers {transformers.__version__}"
        try:
            config = transformers.LlamaConfig(**model.config.to_hf())
        except Exception as error:  # its own checks of a config have classes of their own
            raise UsageError(f"transformers refuses this model: {error}") from None
        self.model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
        weights = {
            name: torch.from_numpy(model.source.read(name, slice(0, tensor.shape[0])).astype(np.float32))
            for name, tensor in model.source.tensors.items()
        }
        missing, unused = self.model.load_state_dict(weights, strict=False)
        if unused or set(missing) - {"lm_head.weight"}:  # a tied head is the embedding itself
            raise RuntimeError(f"transformers names other tensors: missing {missing}, unused {unused}")
        self.model.tie_weights()
        self.weight_bytes = sum(parameter.nbytes for parameter in self.model.parameters())  # a tied one counts once
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, context))
        with torch.inference_mode():
            out = self.model(torch.from_numpy(tokens), use_cache=True)
        self.cache, self.first = out.cache, out.logits[:, -1:].argmax(-1)

    def sample(self) -> float:
        """Seconds a step of greedy decoding from the filled cache."""
        grown = self.cache.get_seq_length() - self.context
        if grown:
            self.cache.crop(-grown)
        token = self.first
        with self.torch.inference_mode():
            began = time.perf_counter()
            for _ in range(self.steps):
                out = self.model(token, cache=self.cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
            token.tolist()
            elapsed = time.perf_counter() - began
        if self.cache.get_seq_length() != self.context + self.steps:
            raise RuntimeError("transformers did not decode from the cache it was given")
        return elapsed / self.steps
