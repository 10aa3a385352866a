"""What speculative decoding gains, in closed form: from the acceptance rate, k, and what passes cost.

Of k proposals, each standing with probability a as long as those before it stand, the expected number of tokens a pass
is (1 - a^(k+1)) / (1 - a), the one that the model adds itself included. A pass costs k draft steps and one pass of the
target over k + 1 positions, so with both in units of the target's plain step the speed-up is

    (1 - a^(k+1)) / (1 - a) / (k c + v)

(Leviathan et al., 2023, theorem 3.8, where v = 1). v is 1 as long as reading the weights hides the arithmetic of k + 1
positions; past that point, which the roofline knows, it grows.
"""

from __future__ import annotations

from dataclasses import dataclass

from roofline.case import Case
from roofline.chips import Chip
from roofline.collectives import CollectiveModel
from roofline.efficiency import Efficiency
from roofline.errors import RooflineError
from roofline.latency import tpot


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens that one pass with k proposals yields, from 1 to k + 1.

    Raises RooflineError for an acceptance outside 0 to 1, or a negative k.
    """
    if not 0 <= acceptance <= 1:
        raise RooflineError(f"acceptance is {acceptance}: it must be from 0 to 1")
    if k < 0:
        raise RooflineError(f"k is {k}: it must be 0 or more")
    return float(sum(acceptance**power for power in range(k + 1)))


def acceptance_of(tokens_per_pass: float, k: int) -> float:
    """The acceptance rate at which ``expected_tokens`` is ``tokens_per_pass``: its inverse, by bisection."""
    if k < 1 or not 1 <= tokens_per_pass <= k + 1:
        raise RooflineError(f"{tokens_per_pass} tokens a pass cannot come from k = {k}: it gives 1 to {k + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tokens_per_pass else (low, middle)
    return (low + high) / 2


def speed_up(acceptance: float, k: int, draft_step: float, verify_pass: float = 1.0) -> float:
    """Tokens a second over those of plain decoding. Costs are in units of the target's plain step."""
    if draft_step < 0 or verify_pass <= 0:
        raise RooflineError(f"costs are {draft_step} and {verify_pass}: the draft's is 0 or more, the pass's above 0")
    return expected_tokens(acceptance, k) / (k * draft_step + verify_pass)


@dataclass(frozen=True)
class Speculation:
    """What was predicted: seconds of a plain step, a draft step and a verifying pass, and what follows from them."""

    k: int
    acceptance: float
    plain_s: float
    draft_s: float
    verify_s: float

    @property
    def tokens_per_pass(self) -> float:
        return expected_tokens(self.acceptance, self.k)

    @property
    def speed_up(self) -> float:
        return speed_up(self.acceptance, self.k, self.draft_s / self.plain_s, self.verify_s / self.plain_s)


def predict(
    target: Case,
    chip: Chip,
    acceptance: float,
    k: int,
    draft: Case | None = None,
    efficiency: Efficiency | None = None,
    collectives: CollectiveModel | None = None,
) -> Speculation:
    """Speculation on ``chip``, from the bytes and operations of both models.

    draft: a draft model on the same devices; None where proposals cost nothing, as in prompt lookup.

    A verifying pass reads the weights once, as a step of ``k + 1`` times as many rows does, but each row's cache only
    once: k + 1 queries share it.
    """
    plain = tpot(target, chip, efficiency, collectives)
    wide = tpot(target.at(batch=target.batch * (k + 1)), chip, efficiency, collectives)
    verify_s = wide.total - wide.kv + plain.kv
    draft_s = 0.0 if draft is None else tpot(draft, chip, efficiency, collectives).total
    return Speculation(k, acceptance, plain.total, draft_s, verify_s)


def best_k(acceptance: float, draft_step: float, verify_passes: dict[int, float]) -> tuple[int, float]:
    """(k, speed-up) of the best of the k that ``verify_passes`` prices; (0, 1) where none gains."""
    gains = {k: speed_up(acceptance, k, draft_step, cost) for k, cost in verify_passes.items()}
    k = max(gains, key=lambda each: gains[each], default=0)
    return (k, gains[k]) if k and gains[k] > 1 else (0, 1.0)
