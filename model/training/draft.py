"""A draft model cut from its teacher: a few of its layers, its embedding and its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from model.checkpoint.table import Path
from model.config import ConfigError, LlamaConfig

SHARED = ("embed", "head")
"""First part of the paths of what a draft shares with its teacher: it is not trained."""


def draft_config(teacher: LlamaConfig, layers: int) -> LlamaConfig:
    """The teacher's configuration with fewer layers.

    Raises:
        ConfigError: no layer, or not fewer than the teacher has.
    """
    if not 1 <= layers < teacher.num_layers:
        raise ConfigError(
            f"a draft of {layers} layers cannot be cut from a model of {teacher.num_layers}; give 1 to "
            f"{teacher.num_layers - 1}"
        )
    return replace(teacher, num_layers=layers)


def kept_layers(teacher_layers: int, layers: int) -> list[int]:
    """Which of the teacher's layers a draft begins as: evenly spread, the first and the last among them."""
    if layers == 1:
        return [0]
    return [round(index * (teacher_layers - 1) / (layers - 1)) for index in range(layers)]


def cut_draft(params: Mapping[Path, jax.Array], teacher: LlamaConfig, layers: int) -> dict[Path, jax.Array]:
    """The parameters of the draft that ``draft_config`` describes, unrolled; arrays are the teacher's own."""
    kept = kept_layers(teacher.num_layers, layers)
    out: dict[Path, jax.Array] = {}
    for path, value in params.items():
        if path[0] != "layers":
            out[path] = value
        elif path[1] in kept:
            out[("layers", kept.index(int(path[1])), *path[2:])] = value
    return out


def frequent_tokens(counts: np.ndarray, size: int, always: Sequence[int] = ()) -> np.ndarray:
    """The ``size`` token ids that occur most, sorted: what a draft's head is cut to.

    A draft proposes what is frequent; a rare token costs one refused proposal, and reading its row of the head costs
    every pass (FR-Spec, Zhao et al., 2025). Among equals low ids win: byte-pair vocabularies number merges by how
    frequent they were.

    Args:
        counts: [V], how often each id occurs.
        size: how many to keep, at most V.
        always: ids to keep whatever their count, such as stop tokens.
    """
    ranked = counts.astype(np.int64).copy()
    ranked[list(always)] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(len(counts)), -ranked))
    return np.sort(order[:size]).astype(np.int32)
