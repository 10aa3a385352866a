"""Shared by the config readers: the error, the rope scaling record, and typed access to a mapping's keys.

The accessors exist so that every refusal names the key, the value that was found and what is allowed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# The supported rope types and, for each, the settings that it needs beside theta.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class ConfigError(ValueError):
    """A model description that is incomplete, contradictory or asks for something unsupported."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context length the model was first trained at.

    kind: "default" leaves them alone; "linear" divides all of them by `factor`; "llama3" divides the long
        wavelengths by `factor`, keeps the short ones and blends in between (Llama 3.1's rule).
    factor: how much longer the context becomes, at least 1.
    low_freq_factor, high_freq_factor: bounds of the blend as `original_max_position_embeddings / wavelength`;
        used by "llama3" alone.
    original_max_position_embeddings: context length, in tokens, before stretching; "llama3" alone.

    Raises ConfigError when a field is out of range, or set for a kind that does not use it.
    """

    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_FIELDS:
            raise ConfigError(f"rope type {self.kind!r} is not supported; supported: {', '.join(ROPE_FIELDS)}")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_number(f"rope scaling {name}", getattr(self, name))
        if self.factor < 1:
            raise ConfigError(f"rope scaling factor is {self.factor}; it must be at least 1")
        if self.kind == "default" and self.factor != 1:
            raise ConfigError(
                f"rope type 'default' has no scaling, yet factor is {self.factor}; "
                "use rope type 'linear' or 'llama3', or drop the factor"
            )
        if self.kind == "llama3":
            check_integer("rope scaling original_max_position_embeddings", self.original_max_position_embeddings)
            if self.low_freq_factor >= self.high_freq_factor:
                raise ConfigError(
                    f"rope scaling low_freq_factor {self.low_freq_factor} must be below high_freq_factor "
                    f"{self.high_freq_factor}"
                )
        elif (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings) != (
            1,
            4,
            None,
        ):
            raise ConfigError(
                f"low_freq_factor, high_freq_factor and original_max_position_embeddings belong to rope type "
                f"'llama3'; rope type {self.kind!r} does not use them"
            )


def check_integer(key: str, value: Any, minimum: int = 1) -> int:
    """`value` if it is an integer of at least `minimum` (a bool is not an integer here), else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{key} is {value!r}; it must be an integer of at least {minimum}")
    return value


def check_number(key: str, value: Any) -> float:
    """`value` as float if it is a finite number above zero, else ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{key} is {value!r}; it must be a finite number above 0")
    return float(value)


def check_flag(key: str, value: Any) -> bool:
    """`value` if it is true or false, else ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}; it must be true or false")
    return value


def require(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    """The value under `key`; ConfigError naming `where` it was looked for when absent or null."""
    value = mapping.get(key)
    if value is None:
        raise ConfigError(f"{where} does not state {key}, which has no safe default; add it")
    return value


def read_token_id(key: str, value: Any) -> int | None:
    """A token id or None for null. -1, which old configs write for "none", is None too."""
    return None if value is None or value == -1 else check_integer(key, value, minimum=0)


def merge_token_ids(*sources: tuple[str, Any]) -> tuple[int, ...]:
    """Union, in order of first mention, of (key, value) pairs; a value is an id, a list of ids or null."""
    merged: dict[int, None] = {}
    for key, value in sources:
        for item in value if isinstance(value, list | tuple) else (value,):
            token_id = read_token_id(key, item)
            if token_id is not None:
                merged[token_id] = None
    return tuple(merged)
