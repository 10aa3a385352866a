"""Distillation: gradients against finite differences in float64, at every degree; what is kept of the teacher."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from model.checkpoint.resolve import open_model
from model.config import ConfigError
from model.training.distill import Distiller, make_optimiser
from model.training.draft import cut_draft, draft_config, frequent_tokens, kept_layers
from model.training.text_pool import TextPool, pool_of, windows
from sharding.layout import Layout
from sharding.mesh import make_mesh
from tests.decode.running import small_model, small_tensors
from tests.model.checkpoint_files import small_config, write_hf
from tests.model.llama_reference import reference_logits

CONFIG = small_config(vocab_size=29, num_layers=3, num_heads=4, num_kv_heads=2)
DRAFT = draft_config(CONFIG, 2)
VOCABULARY = np.array([1, 2, 3, 5, 8, 13, 21, 27, 28], np.int32)
TOKENS = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, 7)).astype(np.int32)
COUNTED = np.array([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]], bool)


def draft_tensors() -> dict[str, np.ndarray]:
    """The teacher's tensors as the draft begins with them: layers 0 and 2."""
    out = {}
    for name, value in small_tensors(CONFIG).items():
        if ".layers.1." not in name:
            out[name.replace(".layers.2.", ".layers.1.")] = value
    return out


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@functools.cache
def teacher_logits() -> list[np.ndarray]:
    return [reference_logits(CONFIG, small_tensors(CONFIG), row) for row in TOKENS.tolist()]


def reference_loss(tensors: Mapping[str, np.ndarray]) -> float:
    total = 0.0
    for teacher, row, counted in zip(teacher_logits(), TOKENS.tolist(), COUNTED, strict=True):
        log_p = log_softmax(teacher[:, VOCABULARY])
        log_q = log_softmax(reference_logits(DRAFT, tensors, row)[:, VOCABULARY])
        total += float(((np.exp(log_p) * (log_p - log_q)).sum(axis=-1) * counted).sum())
    return total / COUNTED.sum()


@functools.cache
def gradients(tp: int) -> tuple[float, dict[Any, np.ndarray], Any]:
    """(loss, gradient by path without padding, held-out scores) at a degree."""
    layout = Layout(make_mesh(tp, CONFIG.num_kv_heads))
    params = small_model(CONFIG).load_params(layout, "float32", progress=False)
    distiller = Distiller(CONFIG, DRAFT, layout, "float32", make_optimiser(9, 1e-3, 2, 1.0), VOCABULARY)
    state, frozen = distiller.start(cut_draft(params, CONFIG, 2))
    head, states = distiller.cut_head(frozen), distiller.teacher_states(params, TOKENS)
    given = (state.params, frozen, head, states, TOKENS, COUNTED)
    loss, found = jax.jit(jax.value_and_grad(distiller.loss()))(*given)
    return float(loss), {path: np.asarray(value) for path, value in found.items()}, distiller.evaluate(*given)


def test_loss_and_gradient_are_those_of_float64(tmp_path: Path) -> None:
    """Along a random direction through every trained tensor: a central difference of the loss in float64."""
    loss, gradient, _ = gradients(1)
    tensors = draft_tensors()
    assert loss == pytest.approx(reference_loss(tensors), rel=1e-4)
    rng = np.random.default_rng(1)
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm"):
        step = {
            name: (rng.standard_normal(value.shape) if part in name else np.zeros(value.shape)).astype(np.float32)
            for name, value in tensors.items()
        }
        ahead, behind = (
            reference_loss({name: tensors[name].astype(np.float64) + sign * 1e-5 * step[name] for name in tensors})
            for sign in (1, -1)
        )
        # Loading is linear, so a direction is loaded like weights.
        model = open_model(str(write_hf(tmp_path / part, DRAFT, step)))
        direction = model.load_params(Layout(make_mesh(1, CONFIG.num_kv_heads)), "float32", progress=False)
        along = sum(float((gradient[path] * np.asarray(direction[path])).sum()) for path in gradient)
        assert along == pytest.approx((ahead - behind) / 2e-5, rel=2e-3, abs=2e-5), part


@pytest.mark.parametrize("tp", [2, 4])
def test_gradients_agree_at_every_degree(tp: int) -> None:
    """tp = 4 is 2 KV heads by 2 positions; F = 45 and the vocabulary's 9 are padded there."""
    loss, gradient, scores = gradients(1)
    other_loss, other, other_scores = gradients(tp)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    for path, value in gradient.items():
        mine = other[path][tuple(slice(0, size) for size in value.shape)]
        np.testing.assert_allclose(mine, value, atol=2e-5 * np.abs(value).max(), err_msg=str(path))
        padding = other[path].copy()
        padding[tuple(slice(0, size) for size in value.shape)] = 0
        assert not padding.any(), "padding must not learn"
    np.testing.assert_allclose(np.array(other_scores), np.array(scores), rtol=1e-5)


def test_scores_are_those_of_float64() -> None:
    """Acceptance counts the teacher's whole vocabulary, not the draft's part of it."""
    *_, scores = gradients(1)
    greedy = sampled = 0.0
    for teacher, row, counted in zip(teacher_logits(), TOKENS.tolist(), COUNTED, strict=True):
        draft = reference_logits(DRAFT, draft_tensors(), row)[:, VOCABULARY]
        p, q = np.exp(log_softmax(teacher))[:, VOCABULARY], np.exp(log_softmax(draft))
        greedy += ((VOCABULARY[draft.argmax(axis=1)] == teacher.argmax(axis=1)) * counted).sum()
        sampled += (np.minimum(p, q).sum(axis=1) * counted).sum()
    assert float(scores.positions) == COUNTED.sum()
    assert float(scores.greedy) == greedy
    assert float(scores.sampled) == pytest.approx(sampled, rel=1e-4)


def test_layers_are_spread_and_the_rest_is_shared() -> None:
    assert kept_layers(30, 1) == [0]
    assert kept_layers(30, 3) == [0, 14, 29]
    assert kept_layers(4, 3) == [0, 2, 3]
    layout = Layout(make_mesh(1, CONFIG.num_kv_heads))
    params = small_model(CONFIG).load_params(layout, "float32", progress=False)
    cut = cut_draft(params, CONFIG, 2)
    assert cut["embed", "weight"] is params["embed", "weight"]
    for path, value in cut.items():
        if path[0] == "layers":
            assert value is params[("layers", {0: 0, 1: 2}[path[1]], *path[2:])]
    for layers in (0, 3):
        with pytest.raises(ConfigError, match="give 1 to 2"):
            draft_config(CONFIG, layers)


def test_frequent_tokens() -> None:
    counts = np.array([0, 5, 1, 5, 0, 2])
    assert frequent_tokens(counts, 3).tolist() == [1, 3, 5]
    assert frequent_tokens(counts, 3, always=[4]).tolist() == [1, 3, 4]
    assert frequent_tokens(np.zeros(6, int), 2).tolist() == [0, 1]


def test_pool() -> None:
    pool = pool_of([[7, 8, 9, 4], [1, 2]], [2, 1], 5)
    assert pool.tokens.tolist() == [[7, 8, 9, 4, 0], [1, 2, 0, 0, 0]]
    # Position 1 is the prompt's last: what follows it is the first token of the answer.
    assert pool.counted.tolist() == [[False, True, True, False, False], [True, False, False, False, False]]
    assert pool.counts(10).tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 0, 1]
    cut = windows(range(8), 3)
    assert cut.tokens.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert cut.counted.tolist() == [[True, True, False]] * 2


def test_every_epoch_meets_every_row_once_and_resumes_anywhere() -> None:
    pool = TextPool(np.zeros((10, 2), np.int32), np.zeros((10, 2), bool))
    whole = list(pool.batches(3, 2, seed=4))
    assert len(whole) == 6
    for epoch in (whole[:3], whole[3:]):
        assert len(set(np.concatenate(epoch).tolist())) == 9
    for first in range(7):
        rest = list(pool.batches(3, 2, seed=4, first=first))
        assert [one.tolist() for one in rest] == [one.tolist() for one in whole[first:]]
