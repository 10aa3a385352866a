import pytest

from roofline.errors import RooflineError
from roofline.goodput import Request, goodput


def test_only_requests_that_met_both_targets_count():
    requests = [
        Request(0.0, 0.2, 0.05, 101),  # good
        Request(0.0, 0.9, 0.05, 101),  # first token late
        Request(0.0, 0.2, 0.20, 101),  # later tokens slow
        Request(1.0, 0.5, 0.10, 11),  # both exactly on target
    ]
    result = goodput(requests, ttft_target_s=0.5, tpot_target_s=0.1, seconds=10)
    assert (result.requests, result.good_requests, result.attainment) == (4, 2, 0.5)
    assert result.tokens_per_s == pytest.approx(31.4)
    assert result.good_tokens_per_s == pytest.approx(11.2)
    assert result.good_requests_per_s == pytest.approx(0.2)


def test_a_big_batch_can_quadruple_throughput_and_bring_goodput_to_zero():
    small = [Request(0, 0.1, 0.02, 101)] * 8
    big = [Request(0, 0.1, 0.04, 101)] * 64
    targets = {"ttft_target_s": 0.2, "tpot_target_s": 0.03}
    one, other = goodput(small, **targets), goodput(big, **targets)
    assert other.tokens_per_s == pytest.approx(4 * one.tokens_per_s, rel=0.05)
    assert one.good_tokens_per_s == one.tokens_per_s
    assert other.good_tokens_per_s == 0


def test_the_run_lasts_from_first_start_to_last_end():
    result = goodput([Request(1.0, 0.5, 0.1, 6), Request(2.0, 1.0, 9.9, 1)], ttft_target_s=1, tpot_target_s=1)
    assert result.seconds == pytest.approx(2.0)  # ends at 2.0 and 3.0
    assert result.good_requests == 2  # one token has no time per later token


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([], {}, "at least one"),
        ([Request(0, 1, 1, 2)], {"ttft_target_s": 0}, "ttft_target_s is 0"),
        ([Request(0, 1, 1, 2)], {"tpot_target_s": -1}, "tpot_target_s is -1"),
        ([Request(0, 1, 1, 2)], {"seconds": 0}, "lasts 0 s"),
    ],
)
def test_bad_input(requests, options, message):
    with pytest.raises(RooflineError, match=message):
        goodput(requests, **({"ttft_target_s": 1.0, "tpot_target_s": 1.0} | options))
