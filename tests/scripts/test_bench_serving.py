"""The load offered, the numbers told, and a small real load on a live server, with every request accounted for."""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model.tokenizer import Tokenizer
from scripts import bench_serving
from scripts._client import Outcome
from scripts._load import Lengths, arrivals, lengths, shots
from scripts._serving_report import LEGEND, render, summarise
from scripts.bench_serving import main
from tests.scripts.tiny import write_tiny
from tests.serve.fake_engine import FakeEngine
from tests.serve.live import Live, live_server


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny") / "model")
    engine = FakeEngine(max_len=4096)
    with live_server(engine, Tokenizer.from_folder(folder), api_keys=["key"]) as server:
        yield server
    engine.close()


def bench(live: Live, tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    given = ("--url", live.url, "--api-key", "key", "--json", str(path), "--quiet", *options)
    assert main([*given, "--prompt-tokens", "4"] if "--prompt-tokens" not in options else given) == 0
    return json.loads(path.read_text())


def test_poisson_arrivals() -> None:
    """Mean and variance of the gaps are those of an exponential; the count in a window is near its expectation."""
    times = np.array(arrivals(np.random.default_rng(0), 4.0, count=20_000, seconds=None))
    gaps = np.diff(times)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    within = arrivals(np.random.default_rng(0), 4.0, count=None, seconds=5000)
    assert within == sorted(within)
    assert 0 <= within[0] < within[-1] < 5000
    assert len(within) == pytest.approx(20_000, rel=0.03)


def test_distributions_of_lengths() -> None:
    rng = np.random.default_rng(0)
    assert lengths("128").draw(rng, 3) == [128] * 3
    uniform = lengths("uniform:16:256").draw(rng, 5000)
    assert (min(uniform), max(uniform)) == (16, 256)
    assert np.mean(uniform) == pytest.approx(136, rel=0.05)
    tail = lengths("lognormal:100:0.6").draw(rng, 5000)
    assert np.median(tail) == pytest.approx(100, rel=0.05)
    assert np.log(tail).std() == pytest.approx(0.6, rel=0.05)
    assert max(tail) <= 800


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "x",
        "1.5",
        "nan",
        "inf",
        "1e9",
        "uniform:3",
        "uniform:9:3",
        "uniform:0:3",
        "uniform:1:inf",
        "normal:1:2",
    ],
)
def test_wrong_distributions(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a distribution"):
        lengths(text)


def test_prompts_share_what_they_are_told_to() -> None:
    made = shots(np.random.default_rng(0), [0.0, 1.0], Lengths("fixed", (20,)), Lengths("fixed", (5,)), 8)
    first, second = (shot.text.split() for shot in made)
    assert len(first) == len(second) == 20
    assert first[:8] == second[:8]
    assert first[8:] != second[8:]
    assert [(shot.at_s, shot.new_tokens) for shot in made] == [(0.0, 5), (1.0, 5)]


def outcome(began: float, arrived: list[float], tokens: int, status: Any = "completed", error: str = "") -> Outcome:
    return Outcome(began, 0.0, status, arrived, tokens, 10, "server", error)


def test_numbers_by_hand() -> None:
    """Three completed (one late, one of a single token), one refused, one failed."""
    found = summarise(
        [
            outcome(10.0, [10.1, 10.2, 10.4], 3),
            outcome(10.5, [11.5, 11.6], 2),
            outcome(11.0, [11.2], 1),
            outcome(11.1, [], 0, "refused", "429: full"),
            outcome(11.2, [11.3], 1, "failed", "timed out"),
        ],
        ttft_slo_s=0.5,
        tpot_slo_s=0.2,
        load={"rate": 2.0},
    )
    assert found["requests"] == {"offered": 5, "completed": 3, "refused": 1, "failed": 1}
    assert found["errors"] == {"429: full": 1, "timed out": 1}
    assert found["seconds"] == pytest.approx(1.6)
    assert found["output_tokens_per_s"] == pytest.approx(6 / 1.6)
    assert found["goodput"]["requests"] == 2
    assert found["goodput"]["share"] == pytest.approx(2 / 5)
    assert found["goodput"]["output_tokens_per_s"] == pytest.approx(4 / 1.6)
    assert found["ttft_ms"]["median"] == pytest.approx(200)
    assert found["ttft_ms"]["p90"] == pytest.approx(np.percentile([100, 200, 1000], 90))
    assert found["tpot_ms"]["mean"] == pytest.approx((150 + 100) / 2)
    assert found["itl_ms"]["max"] == pytest.approx(200)  # the longest wait of a request
    assert found["itl_of_all_gaps_ms"]["mean"] == pytest.approx((100 + 200 + 100) / 3)
    assert found["e2e_ms"]["max"] == pytest.approx(1100)
    text = render([found])
    assert text.splitlines()[1].split() == ["2", "3/1/1", "1.88", "3.8", "1.25", "40%", "2.5"]
    assert LEGEND in text
    assert text.endswith("1 x 429: full\n1 x timed out")


def test_a_run_where_nothing_completes() -> None:
    found = summarise([outcome(0, [], 0, "failed", "x")], ttft_slo_s=1, tpot_slo_s=None, load={"concurrency": 1})
    assert (found["requests_per_s"], found["goodput"]["share"], found["ttft_ms"]) == (0, 0, None)
    assert " - " in render([found])


def test_open_loop_on_a_live_server(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(live, tmp_path, "--rate", "40,80", "--requests", "20", "--prompt-tokens", "uniform:2:6",
                   "--output-tokens", "uniform:5:9", "--ttft-slo", "60000", "--tpot-slo", "60000",
                   "--plot", str(tmp_path / "plot.png"))  # fmt: skip
    assert report["model"] == report["label"] == "tiny"
    for point, rate in zip(report["points"], (40, 80), strict=True):
        assert point["rate"] == rate
        assert point["requests"] == {"offered": 20, "completed": 20, "refused": 0, "failed": 0}
        assert point["tokens_counted_by"] == ["server"]
        assert 20 * 5 <= point["output_tokens"] <= 20 * 9
        assert point["goodput"]["requests"] == 20
        for name in ("ttft", "tpot", "itl", "e2e"):
            stats = point[f"{name}_ms"]
            assert 0 < stats["median"] <= stats["p90"] <= stats["p99"] <= stats["max"]
        assert point["ttft_ms"]["max"] <= point["e2e_ms"]["max"]
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "done/ref/fail" in capsys.readouterr().out


def test_closed_loop_holds_so_many_open(live: Live, tmp_path: Path) -> None:
    seen: list[int] = []
    real = live.engine.submit

    def submit(*given: Any) -> Any:
        ticket = real(*given)
        seen.append(live.engine.stats().running)
        if seen[-1] == 3:
            live.engine.hold_at = None
        return ticket

    live.engine.submit, live.engine.hold_at = submit, 4  # none ends before three are open at once
    try:
        report = bench(live, tmp_path, "--concurrency", "3", "--requests", "12", "--output-tokens", "8",
                       "--endpoint", "chat", "--warmup", "0", "--extra-body", '{"ignore_eos": true}')  # fmt: skip
    finally:
        live.engine.submit = real
    (point,) = report["points"]
    assert point["concurrency"] == 3
    assert point["goodput"] is None
    assert (point["requests"]["completed"], point["output_tokens"]) == (12, 12 * 8)
    assert max(seen) == 3


def test_refusals_and_failures_are_counted(live: Live, tmp_path: Path) -> None:
    real = live.engine.submit
    turns = iter(range(100))

    def submit(request: Any, on_event: Any) -> Any:
        live.engine.refuse_after_s = 1.0 if (turn := next(turns)) % 3 == 0 else None
        if turn % 3 == 1:
            raise KeyError("a fault")
        return real(request, on_event)

    live.engine.submit = submit
    try:
        report = bench(live, tmp_path, "--concurrency", "1", "--requests", "9", "--warmup", "0", "--ttft-slo", "60000")
    finally:
        live.engine.submit, live.engine.refuse_after_s = real, None
    (point,) = report["points"]
    assert point["requests"] == {"offered": 9, "completed": 3, "refused": 3, "failed": 3}
    assert point["goodput"]["share"] == pytest.approx(3 / 9)
    assert set(point["errors"].values()) == {3}


def test_a_server_that_still_starts_is_waited_for(live: Live, tmp_path: Path) -> None:
    live.engine.is_ready = False
    threading.Timer(0.05, setattr, (live.engine, "is_ready", True)).start()
    report = bench(live, tmp_path, "--concurrency", "1", "--requests", "2", "--output-tokens", "2")
    assert report["points"][0]["requests"]["completed"] == 2


def test_a_server_that_goes_on_refusing_ends_the_run(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0, 300)  # seconds that pass from one look to the next
    monkeypatch.setattr(bench_serving, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    live.engine.is_ready = False
    try:
        given = ["--url", live.url, "--api-key", "key", "--rate", "1"]
        assert main(given) == 1
    finally:
        live.engine.is_ready = True
    assert "was refused: 503: this server is still compiling" in capsys.readouterr().err


def test_beside_an_earlier_run(live: Live, tmp_path: Path) -> None:
    bench(live, tmp_path, "--rate", "50", "--requests", "3", "--output-tokens", "2", "--label", "before")
    (tmp_path / "report.json").rename(tmp_path / "before.json")
    plot = str(tmp_path / "both.png")
    bench(live, tmp_path, "--rate", "50", "--requests", "3", "--output-tokens", "2", "--plot", plot,
          "--beside", str(tmp_path / "before.json"))  # fmt: skip
    assert Path(plot).stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "1", "--duration", "3"], "--duration goes with --rate"),
        (["--rate", "1", "--beside", "x.json"], "give --plot PATH, too"),
        (["--rate", "1", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--rate", "1", "--requests", "1"], "does not list models: ClientResponseError: 401"),  # no key
    ],
)
def test_wrong_usage(live: Live, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["--url", live.url, *options]) == 1
    assert message in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    assert main(["--url", f"http://127.0.0.1:{port}", "--rate", "1"]) == 1
    assert f"cannot reach http://127.0.0.1:{port}/v1: " in capsys.readouterr().err


def test_a_url_without_a_scheme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "127.0.0.1:8000", "--rate", "1"])
    assert "'127.0.0.1:8000' begins with neither http:// nor https://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "the stream ended before its answer did"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\ndata: {"error": {"message":1', "JSONDecodeError"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 38\r\n\r\ndata: {"error": {"message": "broken"}}', "stream: broken"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", "500: oops"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [1]\n\n", "AttributeError"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": ["a"]}\n\n', "AttributeError"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"usage": {"completion_tokens": "a"}}\n\n', "ValueError"),
        (b"", "ServerDisconnectedError"),
    ],
)  # fmt: skip
def test_servers_that_answer_badly(tmp_path: Path, answer: bytes, error: str) -> None:
    """Another server's faults are counted, and do not end the run."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=answer_all, daemon=True).start()
        path = tmp_path / "report.json"
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        given = ["--url", url, "--model", "x", "--concurrency", "1", "--requests", "2", "--warmup", "0", "--quiet"]
        assert main([*given, "--json", str(path)]) == 0
    (point,) = json.loads(path.read_text())["points"]
    assert point["requests"]["failed"] == 2
    assert error in next(iter(point["errors"]))
