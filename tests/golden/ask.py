"""Asks transformers, in a process that cannot see this checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIDE = Path(__file__).with_name("transformers_side.py")
CHECKOUT = SIDE.parents[2]


@dataclass(frozen=True)
class Answer:
    """made_with: package -> version. models: name -> arrays, rope: name -> arrays; see `transformers_side`.

    folder: where the request and its files are.
    """

    folder: Path
    made_with: dict[str, str]
    models: dict[str, dict[str, np.ndarray]]
    rope: dict[str, np.ndarray]


def ask_transformers(
    work: Path, models: Sequence[Mapping[str, Any]] = (), rope: Mapping[str, Any] | None = None
) -> Answer:
    """Run `transformers_side` over a request, in the scratch folder `work`."""
    request: dict[str, Any] = {"models": list(models)} | ({"rope": rope} if rope else {})
    file = work / "request.json"
    file.write_text(json.dumps(request))
    command = [sys.executable, "-P", str(SIDE), str(file), str(work)]
    done = subprocess.run(command, env=clean_environment(), cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"transformers_side failed:\n{done.stderr[-4000:]}")
    return Answer(
        work,
        json.loads((work / "made_with.json").read_text()),
        {model["name"]: _arrays(work / f"{model['name']}.npz") for model in models},
        _arrays(work / "rope.npz") if rope else {},
    )


def clean_environment() -> dict[str, str]:
    """This process's environment without the checkout on PYTHONPATH, and with the Hugging Face hub off."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if path and Path(path).resolve() != CHECKOUT]
    return os.environ | {"PYTHONPATH": os.pathsep.join(kept), "HF_HUB_OFFLINE": "1"}


def _arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}
