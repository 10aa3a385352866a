"""A weight in fewer bits: small integers (or 8-bit floats), and the scales that turn them back into numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

BLOCK = 32
"""Values of a row whose 4-bit codes share 16 bytes; every group is a multiple of it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """W [O, I] = q * scales, and + offsets where there are any, with one scale for ``group`` consecutive values.

    values: what q is stored in, the contraction axis last:
        int8 or float8_e4m3fn [..., I]: q itself;
        int4 [..., I]: q itself, -8 to 7, which XLA packs where it can (TPU);
        uint8 [..., I / 2]: two 4-bit codes a byte, q = code - 8. A block of 32 values takes 16 bytes: byte j holds
        value j in its low half and value j + 16 in its high half, as ggml's Q4_0 does.
    scales: [..., ceil(I / group)], or [..., 1] where group is None; float16, bfloat16 or float32. The last group of a
        row may be shorter than the others.
    offsets: as scales, or None.
    """

    values: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    group: int | None = field(metadata={"static": True})

    @property
    def packed(self) -> bool:
        """Two values a byte?"""
        return self.values.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that this stands for."""
        *lead, last = self.values.shape
        return (*lead, 2 * last if self.packed else last)

    def flat(self, out_dims: int = 1) -> QuantizedWeight:
        """[O, I]: the first ``out_dims`` axes are outputs, the others are contracted. Where there are several of the
        latter, groups divide the last one."""

        def merged(array: jax.Array) -> jax.Array:
            return array.reshape(math.prod(array.shape[:out_dims]), -1)

        offsets = None if self.offsets is None else merged(self.offsets)
        return replace(self, values=merged(self.values), scales=merged(self.scales), offsets=offsets)

    def take(self, rows: jax.Array) -> jax.Array:
        """Some rows of a [O, I] weight, as float32 [..., I]; an index outside is clipped."""

        def picked(array: jax.Array) -> jax.Array:
            return jnp.take(array, rows, axis=0, mode="clip")

        offsets = None if self.offsets is None else picked(self.offsets)
        return replace(self, values=picked(self.values), scales=picked(self.scales), offsets=offsets).wide()

    def wide(self) -> jax.Array:
        """The weight in float32, at the size that this saves."""
        q = self.codes().astype(jnp.float32)
        wide = q * self._per_value(self.scales)
        return wide if self.offsets is None else wide + self._per_value(self.offsets)

    def codes(self) -> jax.Array:
        """q [..., I], as int8 where it is packed."""
        return unpack(self.values) if self.packed else self.values

    def _per_value(self, scales: jax.Array) -> jax.Array:
        """[..., groups] -> float32 [..., I]."""
        scales = scales.astype(jnp.float32)
        return scales if self.group is None else jnp.repeat(scales, self.group, axis=-1)[..., : self.shape[-1]]


def unpack(packed: jax.Array) -> jax.Array:
    """uint8 [..., I / 2] -> int8 [..., I], each value its code - 8."""
    blocks = packed.reshape(*packed.shape[:-1], -1, BLOCK // 2)
    codes = jnp.concatenate([blocks & 0xF, blocks >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1).astype(jnp.int8) - 8


def pack(values: jax.Array) -> jax.Array:
    """-8 to 7 [..., I] -> uint8 [..., I / 2]; I is a multiple of ``BLOCK``."""
    codes = (values.astype(jnp.int8) + 8).astype(jnp.uint8).reshape(*values.shape[:-1], -1, 2, BLOCK // 2)
    return (codes[..., 0, :] | codes[..., 1, :] << 4).reshape(*values.shape[:-1], -1)
