"""One way of running a model: everything but the hardware and its efficiency."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import get_args

from model.config import LlamaConfig
from roofline.collectives import SumForm
from roofline.dtypes import DType, parse_dtype, parse_kv_dtype
from roofline.errors import RooflineError
from roofline.footprint import PARTS, Split, check_parts


@dataclass(frozen=True)
class Case:
    """A model, its formats, its split and its load.

    `replicated`: parts that every device holds and reads whole (see `footprint.PARTS`, and "kv").
    `keep`: parts left in bf16 when `dtype` is quantised. `params`: a parameter count given by hand,
    which scales the weights of `config` (70e9 for "a 70B"); None takes the config's own.
    `sum_bytes`: bytes of one number in a cross-device sum (4: sums are taken in f32).
    `collective`: how a decode step adds up its partial sums, see `step_collectives`.
    """

    config: LlamaConfig
    dtype: str | DType = "bf16"
    kv_dtype: str | DType = "bf16"
    tp: int = 1
    batch: int = 1
    context: int = 0
    replicated: Collection[str] = ()
    keep: Collection[str] = ()
    params: float | None = None
    sum_bytes: int = 4
    collective: SumForm = "psum"

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        parse_kv_dtype(self.kv_dtype)
        Split.of(self.config, self.tp, self.replicated)
        check_parts("keep", self.keep, PARTS)
        if self.batch < 1:
            raise RooflineError(f"batch is {self.batch}: it must be 1 or more")
        if self.context < 0:
            raise RooflineError(f"context is {self.context}: it must be 0 or more")
        if self.collective not in get_args(SumForm):
            raise RooflineError(f"collective is {self.collective!r}: use one of {', '.join(get_args(SumForm))}")
        if self.collective == "scatter" and (whole := {"embed", "out", "down"} & set(self.replicated)):
            raise RooflineError(
                f"collective scatter splits what embed, out and down add up: {', '.join(sorted(whole))} cannot be "
                f"replicated; use psum"
            )
        if self.params is not None and self.params <= 0:
            raise RooflineError(f"params is {self.params}: it must be positive")

    @property
    def parameter_count(self) -> float:
        """The count given by hand, or the config's."""
        return self.config.parameter_count() if self.params is None else self.params

    @property
    def weight_scale(self) -> float:
        """Factor on every weight byte and weight operation that `params` asks for."""
        return self.parameter_count / self.config.parameter_count()

    @property
    def weight_format(self) -> DType:
        """The parsed weight dtype."""
        return parse_dtype(self.dtype)

    @property
    def split(self) -> Split:
        """How `tp` divides heads and positions."""
        return Split.of(self.config, self.tp, self.replicated)

    def at(self, **changes: object) -> Case:
        """A copy with some fields changed: `case.at(tp=4)`."""
        return replace(self, **changes)  # type: ignore[arg-type]
