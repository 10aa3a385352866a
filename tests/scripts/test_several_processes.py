"""Two processes of one device each over loopback: the tokens of one process, and an end with a reason for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.generate import GROUPED
from tests.scripts.several import run_several
from tests.scripts.tiny import CONFIG, answer, tokens_of, write_tiny

PROMPT = "Once upon"
N = 30
GENERATE = "scripts.generate"

pytestmark = pytest.mark.xdist_group("several-processes")  # two processes at a time are enough for two cores


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


def options(tiny: Path, *more: str | Path) -> list[str | Path]:
    return ["--model", tiny, "--prompt", PROMPT, "--max-new-tokens", str(N), "--cpu-devices", "1", *more]


def test_two_processes_say_what_one_says(tiny: Path, tmp_path: Path) -> None:
    """Sampled, so that a difference of a step would show; standard output is process 0's JSON and nothing else."""
    sampling = {"temperature": 1.5, "top_k": 40, "seed": 11}
    chosen = [text for name, value in sampling.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    first, second = run_several(GENERATE, tmp_path, options(tiny, "--json", "-", "--quiet", *chosen))
    assert (first.status, second.status, second.out, second.err) == (0, 0, "", ""), (first.err, second.err)
    found = json.loads(first.out)
    assert found["token_ids"] == answer(tiny, tokens_of(PROMPT), N, **sampling)
    assert (found["tp"], found["device"]["processes"], found["device"]["count"]) == (2, 2, 2)
    # Each process reads what its own device holds: no more than that, and between them the whole checkpoint.
    whole = 4 * CONFIG.parameter_count()
    for one in (first, second):
        assert 0 < one.bytes_read <= found["weight_bytes_per_device"] < 0.7 * whole
    assert first.bytes_read + second.bytes_read >= whole


def test_two_processes_run_many_prompts_as_process_0_decides(tiny: Path, tmp_path: Path) -> None:
    """Through the batching engine, whose steps the second process follows."""
    texts = [f"{number} is a number" for number in range(GROUPED + 1)]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    sampling = {"temperature": 1.5, "repetition_penalty": 1.3, "seed": 11}
    chosen = [text for name, value in sampling.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    asked = ["--model", tiny, "--prompts-file", tmp_path / "prompts.txt", "--batch", "2", "--max-new-tokens", "5"]
    first, second = run_several(GENERATE, tmp_path, [*asked, "--cpu-devices", "1", "--json", "-", "--quiet", *chosen])
    assert (first.status, second.status, second.out, second.err) == (0, 0, "", ""), (first.err, second.err)
    found = json.loads(first.out)
    assert (found["tp"], found["device"]["processes"]) == (2, 2)
    assert [one["token_ids"] for one in found["completions"]] == [
        answer(tiny, tokens_of(text), 5, **sampling) for text in texts
    ]


def test_two_tasks_of_slurm_find_each_other(tiny: Path, tmp_path: Path) -> None:
    first, second = run_several(GENERATE, tmp_path, options(tiny, "--json", "-", "--quiet"), slurm=True)
    assert (first.status, second.status) == (0, 0), (first.err, second.err)
    found = json.loads(first.out)
    assert found["token_ids"] == answer(tiny, tokens_of(PROMPT), N)
    assert found["device"]["processes"] == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_killed_ends_the_other(tiny: Path, tmp_path: Path, lost: int) -> None:
    fates = ["end", "end"]
    fates[lost] = "die"
    ends = run_several(GENERATE, tmp_path, options(tiny, "--quiet"), fates)
    assert ends[1 - lost].status not in (0, None)
    told = [f"error: process {lost} of 2 was lost: it closed its connection"]
    if lost == 0:  # JAX's own service goes with process 0, and its watch may be the first to notice
        told.append("most likely indicates that another task died")
    assert any(each in ends[1 - lost].err for each in told), ends[1 - lost].err


def test_a_process_that_hangs_ends_the_other_after_the_stated_time(tiny: Path, tmp_path: Path) -> None:
    stuck = options(tiny, "--quiet", "--peer-timeout", "15")  # in which both must start, on a busy machine, too
    first, _ = run_several(GENERATE, tmp_path, stuck, ["end", "freeze"])
    assert first.status == 1
    assert "error: process 1 of 2 was lost: it has been silent for 15 s" in first.err


def test_a_process_that_fails_tells_the_other_why(tiny: Path, tmp_path: Path) -> None:
    first, second = run_several(GENERATE, tmp_path, options(tiny, "--quiet"), ["end", "fail"])
    assert (first.status, second.status) == (1, 1)
    assert "RuntimeError: an unforeseen fault" in second.err
    assert "error: process 1 of 2 stopped: RuntimeError in its program" in first.err


@pytest.mark.parametrize(("wrong", "told"), [(["--top-k", "4"], "--top-k has no effect"), (["--tp", "1"], "--tp 2 or")])
def test_bad_input_ends_both(tiny: Path, tmp_path: Path, wrong: list[str], told: str) -> None:
    for one in run_several(GENERATE, tmp_path, options(tiny, *wrong)):
        assert (one.status, one.out) == (1, "")
        assert told in one.err
        assert one.err.count("error: ") == 1


@pytest.mark.parametrize("late", [0, 1])
def test_a_process_whose_other_is_late_says_so(tiny: Path, tmp_path: Path, late: int) -> None:
    fates = ["end", "end"]
    fates[late] = "absent"
    (only,) = run_several(GENERATE, tmp_path, options(tiny, "--peer-timeout", "2"), fates)
    assert (only.status, only.out) == (1, "")
    assert f"error: process {1 - late} of 2 waited 2 s for all the others to join at 127.0.0.1:" in only.err


def test_processes_with_different_options_are_refused_by_both(tiny: Path, tmp_path: Path) -> None:
    """They would wait for each other's collectives for ever, or mix two answers."""
    seeds = (["--temperature", "1", "--seed", "1"], ["--temperature", "1", "--seed", "2"])
    for one in run_several(GENERATE, tmp_path, options(tiny, "--quiet"), own=seeds):
        assert (one.status, one.out) == (1, "")
        assert "error: process 1 was started with --seed 2, process 0 with 1; start all alike" in one.err
