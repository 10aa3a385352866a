"""Pallas products of quantised weights: interpreted against float64 NumPy, compiled, and the table that chooses."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.normed_gate import normed_gate
from kernels.normed_matmul import normed_matmul
from kernels.quantized import QuantizedWeight, pack
from kernels.quantized_matmul import pallas_gpu, pallas_tpu, quantized_matmul, table
from kernels.select import KernelError
from model.presets import PRESETS
from tests.kernels.compiled import compile_for

NAMES = ("pallas_tpu", "pallas_gpu")


def random_weight(
    O: int,
    I: int,
    kind: str,
    group: int | None,
    *,
    offsets: bool,
    seed: int = 0,
    scale_dtype: Any = jnp.float32,
) -> QuantizedWeight:
    rng = np.random.default_rng(seed)
    groups = 1 if group is None else -(-I // group)
    low, high = (-127, 128) if kind == "int8" else (-8, 8)
    codes = jnp.asarray(rng.integers(low, high, (O, I)), jnp.int8)
    values = {"int8": lambda: codes, "int4": lambda: codes.astype(jnp.int4), "packed": lambda: pack(codes)}[kind]()
    scales, added = (jnp.asarray(rng.uniform(0.5, 2, (O, groups)) / high, scale_dtype) for _ in range(2))
    return QuantizedWeight(values, scales, added if offsets else None, group)


def exact(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """By hand, in float64."""
    codes = np.asarray(weight.codes().astype(jnp.int8), np.float64)
    repeats = codes.shape[1] if weight.group is None else weight.group
    scales = np.repeat(np.asarray(weight.scales, np.float64), repeats, axis=1)[:, : codes.shape[1]]
    wide = codes * scales
    if weight.offsets is not None:
        wide += np.repeat(np.asarray(weight.offsets, np.float64), repeats, axis=1)[:, : codes.shape[1]]
    return np.asarray(x, np.float64) @ wide.T


@functools.partial(jax.jit, static_argnames="implementation")
def run(x: Any, weight: QuantizedWeight, implementation: str) -> jax.Array:
    return quantized_matmul(x, weight, platform="cpu", out_dtype=jnp.float32, implementation=implementation)


def check(implementation: str, M: int, weight: QuantizedWeight, dtype: Any, seed: int) -> None:
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((M, weight.shape[1])), dtype)
    found, expected = np.asarray(run(x, weight, implementation)), exact(np.asarray(x), weight)
    # float32: rounding of sums. bf16: each scaled code is rounded to 8 bits before the product.
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=scale * (2e-6 if dtype == jnp.float32 else 6e-3))


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize(
    ("O", "I", "kind", "group", "offsets"),
    [
        (48, 160, "int8", None, False),
        (48, 160, "int8", 64, False),  # the last group of a row is shorter
        (32, 576, "int4", 128, False),
        (32, 544, "int4", 32, True),
    ],
)
@settings(max_examples=3, deadline=None)
@given(M=st.sampled_from([1, 3, 17]), dtype=st.sampled_from([jnp.float32, jnp.bfloat16]), seed=st.integers(0, 99))
def test_a_product(
    implementation: str,
    O: int,
    I: int,
    kind: str,
    group: int | None,
    offsets: bool,
    M: int,
    dtype: Any,
    seed: int,
) -> None:
    if kind == "int4" and implementation == "pallas_gpu":
        kind = "packed"
    weight = random_weight(O, I, kind, group, offsets=offsets, seed=seed, scale_dtype=dtype)
    check(implementation, M, weight, dtype, seed)


def test_many_rows_run_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_tpu, "MOST_ROWS", 16)
    monkeypatch.setattr(pallas_gpu, "MOST_ROWS", 16)
    for kind, offsets in (("int8", False), ("int4", True)):
        for implementation in NAMES:
            packed = kind == "int4" and implementation == "pallas_gpu"
            weight = random_weight(32, 96, "packed" if packed else kind, 32, offsets=offsets)
            check(implementation, 41, weight, jnp.float32, 1)


def test_what_is_not_taken() -> None:
    x = jnp.zeros((1, 64))
    for implementation, kind, told in (
        ("pallas_tpu", "packed", "not two in a byte"),
        ("pallas_gpu", "int4", "not as int4"),
    ):
        with pytest.raises(KernelError, match=rf"quantized_matmul: implementation '{implementation}' takes.*{told}"):
            run(x, random_weight(32, 64, kind, 32, offsets=False), implementation)
    with pytest.raises(KernelError, match=r"takes outputs and values in multiples of 16.*\(24, 64\)"):
        run(x, random_weight(24, 64, "packed", 32, offsets=False), "pallas_gpu")


def shapes(platform: str, kind: str, group: int | None, O: int, I: int) -> QuantizedWeight:
    """A weight as the platform holds it."""
    kind = "packed" if kind == "int4" and platform == "gpu" else kind
    scale = jnp.float32 if group is None else jnp.bfloat16 if platform == "tpu" else jnp.float16
    dtypes = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4, "packed": jnp.uint8}
    values = jax.ShapeDtypeStruct((O, I // 2 if kind == "packed" else I), dtypes[kind])
    scales = jax.ShapeDtypeStruct((O, 1 if group is None else -(-I // group)), scale)
    return QuantizedWeight(values, scales, None, group)


def test_every_row_of_the_table_is_reached_and_gives_its_reason() -> None:
    reached = [
        table.choose(platform, rows, shapes(platform, "int8", group, 64, 64))
        for platform in ("tpu", "gpu")
        for group in (None, 32)
        for rows in (1, 2, 257)
    ]
    assert set(table.CHOICES) == set(reached)
    assert all(choice.reason for choice in table.CHOICES)
    assert table.choose("cpu", 1, shapes("gpu", "int4", 32, 64, 64)) is None
    per_row = dataclasses.replace(
        shapes("tpu", "int8", None, 64, 64), offsets=jax.ShapeDtypeStruct((64, 1), jnp.float32)
    )
    assert table.choose("tpu", 1, per_row).implementation == "pallas_tpu"


@pytest.mark.parametrize(("platform", "kind"), [("tpu", "int4"), ("gpu", "packed")])
def test_products_behind_a_norm_use_it_too(platform: str, kind: str) -> None:
    x, scale, weight = jnp.zeros((2, 64)), jnp.zeros(64), random_weight(32, 64, kind, 32, offsets=False)
    for operation in (normed_matmul, normed_gate):
        traced = jax.make_jaxpr(lambda x, w, op=operation: op(x, scale, 1e-5, w, platform=platform))(x, weight)
        assert str(traced).count("pallas_call[") == 1


@pytest.mark.parametrize("name", ["v5e", "v6e", "h100"])
@pytest.mark.parametrize(
    ("kind", "group", "M", "O", "I"),
    [
        ("int4", 32, 1, 1024, 1792),
        ("int4", 64, 2, 1024, 1792),
        ("int4", 128, 16, 576, 1536),
        ("int8", 128, 64, 1024, 576),
        ("int8", None, 8, 512, 512),
    ],
)
def test_what_the_table_says_compiles_without_a_wide_weight(
    name: str,
    kind: str,
    group: int | None,
    M: int,
    O: int,
    I: int,
) -> None:
    platform = "gpu" if name == "h100" else "tpu"
    weight = shapes(platform, kind, group, O, I)
    found = compile_for(
        name,
        lambda x, weight: quantized_matmul(x, weight, platform=platform),
        jax.ShapeDtypeStruct((M, I), jnp.bfloat16),
        weight,
    )
    text = found.as_text()
    kernels = text.count('custom_call_target="' + ("__gpu$xla.gpu.triton" if platform == "gpu" else "tpu_custom_call"))
    assert kernels == (table.choose(platform, M, weight).implementation != "xla")
    assert not any(f"{dtype}[{O},{I}]" in text[text.index("ENTRY") :] for dtype in ("bf16", "f32", "f16"))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_blocks_fit_for_every_preset(tp: int) -> None:
    """Each weight of each preset, as split over devices: on TPU in VMEM, or XLA takes it; on GPU in shared memory."""
    too_wide = []
    for name, config in PRESETS.items():
        D, F, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        for O, I in ((heads, D), (D, heads // tp), (2 * F // tp, D), (D, F // tp), (config.vocab_size // tp, D)):
            for bits, group, M in ((4, 32, 1), (4, 128, 256), (8, 128, 64)):
                tile = pallas_tpu.choose(M, O, I, bits, -(-I // group), 2, offsets=True)
                if tile is None:
                    too_wide.append((name, O, I))
                else:
                    used = tile.vmem_bytes(I, bits, -(-I // group), 2, offsets=True)
                    assert used <= pallas_tpu.VMEM_BYTES
                on_gpu = pallas_gpu.choose(M, O // 16 * 16, I // 32 * 32 // (8 // bits))
                assert on_gpu is not None
                assert on_gpu.shared_bytes(2) <= 200 << 10
    # Only where a device holds rows that no TPU has memory for.
    assert all(I > 16384 for _, _, I in too_wide), too_wide
