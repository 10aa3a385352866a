"""llama.cpp as a peer to time beside ours, through the C interface that ``llama-cpp-python`` wraps."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from scripts._cli import UsageError

FILE_TYPES = {"f32": 0, "bf16": 32, "q8_0": 7, "q4_0": 2}
"""The tool's numbers for the types that it makes of a whole model (``llama_ftype``)."""


def check_llama_cpp() -> str:
    """Its version. Raises UsageError where the package is missing, or cannot be loaded."""
    try:
        import llama_cpp
    except ImportError as error:
        raise UsageError(f"llama.cpp is not here ({error}): pip install -e '.[peers]'") from None
    except OSError as error:  # built for another CPU or C library
        raise UsageError(f"llama.cpp cannot be loaded: {error}") from None
    return llama_cpp.__version__


def quantized_file(source: Path, target: Path, file_type: str, threads: int) -> Path:
    """``target``, which its tool makes of the GGUF file ``source``. Raises UsageError where it refuses."""
    api = _quiet_api()
    params = api.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.allow_requantize = threads, FILE_TYPES[file_type], True
    if api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise UsageError(f"llama.cpp does not make {file_type} of {source}")
    return target


def model_facts(path: Path) -> tuple[int, list[int]]:
    """Bytes of its weights, and the tokens that end an answer. Raises UsageError where it cannot be loaded."""
    api = _quiet_api()
    model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
    if not model:
        raise UsageError(f"llama.cpp cannot load {path}")
    vocabulary = api.llama_model_get_vocab(model)
    ids = range(api.llama_vocab_n_tokens(vocabulary))
    facts = int(api.llama_model_size(model)), [token for token in ids if api.llama_vocab_is_eog(vocabulary, token)]
    api.llama_model_free(model)
    return facts


class LlamaCppChain:
    """A filled cache, and the same number of greedy steps from it for each sample; nothing but C between them."""

    def __init__(self, path: Path, tokens: list[int], steps: int, threads: int):
        self.api, self.steps, self.context_size = _quiet_api(), steps, len(tokens)
        self.model = self.api.llama_model_load_from_file(os.fsencode(path), self.api.llama_model_default_params())
        if not self.model:
            raise UsageError(f"llama.cpp cannot load {path}")
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.no_perf = len(tokens) + steps + 1, len(tokens), True
        params.n_threads = params.n_threads_batch = threads
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise UsageError(f"llama.cpp cannot make a context of {params.n_ctx} positions for {path}")
        self.weight_bytes = int(self.api.llama_model_size(self.model))
        self.vocabulary = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.first = self._decode(tokens)

    def _decode(self, tokens: list[int]) -> int:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama.cpp did not decode")
        logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, -1), (self.vocabulary,))
        return int(logits.argmax())

    def sample(self) -> float:
        """Seconds a step of greedy decoding from the filled cache."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, self.context_size, -1)
        self.tokens = [self.first]
        began = time.perf_counter()
        for _ in range(self.steps):
            self.tokens.append(self._decode(self.tokens[-1:]))
        return (time.perf_counter() - began) / self.steps

    def close(self) -> None:
        """Free its memory."""
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def _quiet_api() -> Any:
    """The C functions, which otherwise print pages on stderr."""
    import llama_cpp

    llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p(0))
    return llama_cpp


_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
