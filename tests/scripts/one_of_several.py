"""A command in a process of its own, which counts what it reads of the checkpoint and can come to a bad end.

    python -m tests.scripts.one_of_several MODULE FATE COUNT_FILE ARGUMENTS...

FATE: "end" well; or when the second piece of text is due, "die" (SIGKILL), "freeze" (SIGSTOP) or "fail" (an error).
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decode.decoder import Arrival, Decoder
from model.checkpoint.safetensors import SafetensorsSource


def main() -> int:
    module, fate, count_file, *arguments = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    count = [0]
    read, run = SafetensorsSource.read, Decoder._run

    def counted(self: SafetensorsSource, *where: Any) -> np.ndarray:
        block = read(self, *where)
        count[0] += block.nbytes
        return block

    def doomed(self: Decoder, *arguments: Any) -> Iterator[Arrival]:
        Path(count_file).write_text(str(count[0]))
        for index, arrival in enumerate(run(self, *arguments)):
            if index == 1 and fate != "end":
                if fate == "fail":
                    raise RuntimeError("an unforeseen fault")
                os.kill(os.getpid(), {"die": signal.SIGKILL, "freeze": signal.SIGSTOP}[fate])
            yield arrival

    SafetensorsSource.read = counted  # type: ignore[method-assign]
    Decoder._run = functools.wraps(run)(doomed)  # type: ignore[method-assign,assignment]
    return importlib.import_module(module).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
