"""What proposes tokens: the interface that the verifying loop and every proposer agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from decode.sampling import SamplingForm, SamplingValues
from decode.step import Rows
from model.config import LlamaConfig

MOST_PROPOSALS = 15
"""Proposals a pass: with the newest token they are the 16 positions that the decode kernels take together."""


class SpeculationError(ValueError):
    """A proposer or a number of proposals that cannot work with this model."""


class Proposal(NamedTuple):
    """Up to k tokens for each row, to follow its newest one.

    tokens: int32 [B, k]
    meant: int32 [B], how many of them are meant, from the first on
    log_q: the log-probabilities that they were sampled from, float32 [B, k, V / tp], this device's slice; None where
        they were not sampled at all, so that each had probability 1
    """

    tokens: jax.Array
    meant: jax.Array
    log_q: jax.Array | None


class Proposer(Protocol):
    """One way of proposing. ``propose`` runs inside the compiled loop, everything else on the host.

    name: for reports. always: it has a proposal for every row in every pass.
    """

    name: str
    always: bool

    def check(self, target: LlamaConfig) -> None:
        """Raise SpeculationError where it cannot serve this model."""
        ...

    def leaves(self) -> Any:
        """Arrays that ``propose`` reads, such as weights: a pytree, an argument of the program."""
        ...

    def leaf_specs(self) -> Any:
        """How ``leaves`` lie on the mesh."""
        ...

    def prepare(self, prompt_lens: Sequence[int], max_len: int) -> float:
        """Compile what ``begin`` runs; returns the seconds that it took."""
        ...

    def begin(self, prompts: Sequence[Sequence[int]], max_len: int) -> Any:
        """The state that passes carry, after these prompts: a pytree of arrays, donated with every dispatch."""
        ...

    def state_specs(self) -> Any:
        """How the state lies on the mesh."""
        ...

    def abstract_state(self, batch: int, max_len: int) -> Any:
        """The state's shapes, to compile for."""
        ...

    def propose(
        self,
        leaves: Any,
        state: Any,
        rows: Rows,
        history: jax.Array,
        k: int,
        values: SamplingValues,
        form: SamplingForm,
    ) -> tuple[Any, Proposal]:
        """Tokens to follow ``rows.token``, which stands at position ``rows.length`` of ``history`` int32 [B, S]."""
        ...
