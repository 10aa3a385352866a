import pytest

from roofline.case import Case
from roofline.ceilings import attainable, decay, decode_ceiling, memory_fit, ridge, smallest_tp
from roofline.chips import CHIPS
from tests.roofline.cases import LLAMA_8B, LLAMA_70B

H100 = CHIPS["h100"]


def test_ridge_of_the_memory_wall():
    assert ridge(H100) == pytest.approx(295, abs=0.5)


def test_roofline_is_the_lesser_of_both_limits():
    assert attainable(H100, 1.0) == 3.35e12
    assert attainable(H100, 2_000) == 989e12
    assert attainable(H100, ridge(H100)) == pytest.approx(989e12)


def test_decode_ceiling_of_the_memory_wall():
    start = decode_ceiling(H100, 140e9)
    assert start.tokens_per_s == pytest.approx(23.9, abs=0.05)
    assert start.ms_per_step == pytest.approx(41.8, abs=0.05)


def test_decay_of_the_memory_wall():
    start, end = decay(H100, 140e9, 327_680, (0, 128_000))
    assert end.bytes_per_step == pytest.approx(181.9e9, rel=1e-3)
    assert end.tokens_per_s == pytest.approx(18.4, abs=0.05)
    assert 1 - end.tokens_per_s / start.tokens_per_s == pytest.approx(0.23, abs=0.005)


def test_batch_shares_the_weights_but_not_the_caches():
    ceiling = decode_ceiling(H100, 140e9, 327_680, 1_000, batch=10, devices=4)
    assert ceiling.ms_per_step == pytest.approx((140e9 + 10 * 1_000 * 327_680) / (4 * 3.35e12) * 1e3)
    assert ceiling.tokens_per_s == pytest.approx(10 / ceiling.ms_per_step * 1e3)


def test_what_does_not_fit_says_by_how_much_and_where_it_would():
    case = Case(LLAMA_70B, context=8_000)
    fit = memory_fit(H100, case)
    assert not fit.fits
    assert fit.largest_batch == 0
    assert fit.free_bytes == pytest.approx(80e9 - 2 * 70_553_706_496 - 8_000 * 327_680)
    assert smallest_tp(H100, case) == 2
    assert memory_fit(H100, case.at(tp=2)).fits


def test_the_largest_batch():
    fit = memory_fit(H100, Case(LLAMA_8B, context=10_000))
    assert fit.largest_batch == int((80e9 - 2 * 8_030_261_248) // (10_000 * 131_072))
    assert memory_fit(H100, Case(LLAMA_8B)).largest_batch is None


def test_nothing_fits_up_to_the_limit():
    assert smallest_tp(CHIPS["tpu-v5e"], Case(LLAMA_70B), limit=4) is None


def test_a_given_count_scales_the_weights():
    fit = memory_fit(H100, Case(LLAMA_70B, params=70e9, tp=2))
    assert fit.weight_bytes == pytest.approx(70e9, rel=1e-4)  # norms are whole on both devices
