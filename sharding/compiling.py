"""How a step is compiled: what its platform's compiler is told beside the program."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import jax

_log = logging.getLogger(__name__)

OPTIONS: Mapping[str, Mapping[str, str]] = {"tpu": {"xla_tpu_sliced_prefetch_max_slices": "0"}}
"""Of each platform's compiler.

XLA:TPU fetches weights to the chip ahead of their products, left to itself in up to 14 slices. Each slice takes tables
in main memory, at a multiple of 16 KiB: 80 layers of llama-3-70b in bf16 over 8 devices of v6e are said to need 127 MiB
beside weights and cache, against 22 where each weight is fetched in one piece. It fetches the same bytes either way.
"""


def compile_lowered(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """The program compiled with ``OPTIONS``; without them where the compiler is one that does not know them."""
    options = OPTIONS.get(platform)
    if not options:
        return lowered.compile()
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        _say_once(str(error).partition("\n")[0])
        return lowered.compile()


@functools.cache
def _say_once(refusal: str) -> None:
    _log.warning("this compiler does not take an option and a step is compiled without any: %s", refusal)
