"""The load that a serving benchmark offers: when requests come, how long they are, and what they say."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
""".split()  # noqa: SIM905
"""Common words, which nearly every BPE vocabulary holds as one token with the blank before them."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers of at least 1, as written on a command line.

    "128": always that; "uniform:16:256": any from 16 to 256; "lognormal:128:0.6": with that median, and that standard
    deviation of the logarithm, at most 8 times the median (lengths of real chats have such a tail).
    """

    kind: str
    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.kind == "fixed":
            found = np.full(count, self.values[0])
        elif self.kind == "uniform":
            found = rng.integers(int(self.values[0]), int(self.values[1]) + 1, count)
        else:
            median, sigma = self.values
            found = np.minimum(median * np.exp(sigma * rng.standard_normal(count)), 8 * median)
        return [max(1, round(float(value))) for value in found]


def lengths(text: str) -> Lengths:
    """argparse type: see ``Lengths``."""
    kind, *parts = text.split(":") if ":" in text else ("fixed", text)
    wrong = argparse.ArgumentTypeError(
        f"{text!r} is not a distribution of lengths; give 128, uniform:16:256 or lognormal:128:0.6"
    )
    try:
        values = tuple(float(part) for part in parts)
    except ValueError:
        raise wrong from None
    fits = {
        "fixed": len(values) == 1 and values[0] >= 1,
        "uniform": len(values) == 2 and 1 <= values[0] <= values[-1] < float("inf"),
        "lognormal": len(values) == 2 and values[0] >= 1 and 0 <= values[-1] <= 3,
    }
    whole = kind == "lognormal" or all(value == int(value) for value in values if abs(value) < float("inf"))
    if not fits.get(kind) or not whole or max(values) > 1e7:
        raise wrong
    return Lengths(kind, values)


@dataclass(frozen=True)
class Shot:
    """One request to send: seconds after the start (open loop), its text, and how many tokens it asks for."""

    at_s: float
    text: str
    new_tokens: int


def arrivals(rng: np.random.Generator, rate: float, *, count: int | None, seconds: float | None) -> list[float]:
    """Times of a Poisson process of ``rate`` a second: ``count`` of them, or those within ``seconds``."""
    if count is not None:
        return [float(at) for at in np.cumsum(rng.exponential(1 / rate, count))]
    assert seconds is not None
    return sorted(float(at) for at in rng.uniform(0, seconds, rng.poisson(rate * seconds)))


def shots(
    rng: np.random.Generator, times: Sequence[float], prompt: Lengths, output: Lengths, shared_prefix: int
) -> list[Shot]:
    """One shot for each time. Prompts are of random words, after ``shared_prefix`` words that all of them share."""
    prefix = _words(rng, shared_prefix)
    sizes, news = prompt.draw(rng, len(times)), output.draw(rng, len(times))
    return [
        Shot(at, " ".join([*prefix, *_words(rng, max(1, size - shared_prefix))]), new)
        for at, size, new in zip(times, sizes, news, strict=True)
    ]


def _words(rng: np.random.Generator, count: int) -> list[str]:
    return [WORDS[index] for index in rng.integers(0, len(WORDS), count)]
