"""The command: a real model in a process of its own, asked over HTTP, and ended by signals."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.serve import _say, main
from tests.scripts.several import PATIENCE_S, ROOT, free_port, session_cache
from tests.scripts.tiny import EOS, answer, text_of, tokens_of, write_tiny

NEW = 20
SMALL = ["--max-batch", "1", "--token-budget", "16", "--cpu-devices", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


def start(tiny: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scripts.serve", "--model", str(tiny), "--port", "0", *SMALL, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **session_cache(), **environment}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening at http://127.0.0.1:"), process.communicate(timeout=PATIENCE_S)[1]
    return line.split()[-1]


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("ready after"):
            return
    raise AssertionError("".join(lines))


@contextmanager
def ended(processes: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def solo(tiny: Path, prompt: str) -> str:
    tokens = answer(tiny, tokens_of(prompt), NEW)
    return text_of(tokens[: tokens.index(EOS)] if EOS in tokens else tokens)


def ask(url: str, prompt: str, **options: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, **options}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_a_server_from_start_to_end(tiny: Path) -> None:
    """It answers /health while it compiles, then as plain decoding does, and on SIGTERM ends what runs and itself."""
    process = start(tiny, "--served-name", "tiny", "--speculate", "ngram", "--k", "1")
    with ended([process]):
        url = url_of(process)
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        wait_ready(process)
        assert httpx.get(f"{url}/ready").status_code == 200
        for prompt in ("abc", "abc abc abc abc"):
            assert ask(url, prompt).json()["choices"][0]["text"] == solo(tiny, prompt)
        assert "shardstream_proposed_tokens_total" in httpx.get(f"{url}/metrics").text
        answers: list[httpx.Response] = []
        running = threading.Thread(target=lambda: answers.append(ask(url, "xyz", n=32, ignore_eos=True)))
        running.start()
        while running.is_alive() and "running_requests 1.0" not in httpx.get(f"{url}/metrics").text:
            pass
        process.send_signal(signal.SIGTERM)
        running.join()
        assert answers[0].status_code == 200
        assert len(answers[0].json()["choices"]) == 32
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        told = process.stderr.read()
        assert told.startswith("draining 1 request for 120 s at most; a second signal ends it") or told == "stopping\n"


def test_a_log_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a drain would be cut off by what is said of it: see ``_serve``."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(io.FileIO(write, "w"), write_through=True))
    _say(argparse.Namespace(quiet=False), "draining")


def test_a_signal_while_it_compiles(tiny: Path) -> None:
    process = start(tiny, JAX_ENABLE_COMPILATION_CACHE="0")
    with ended([process]):
        url_of(process)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "stopped while compiling" in told


@pytest.mark.xdist_group("several-processes")
def test_two_processes_say_what_one_says(tiny: Path) -> None:
    """Process 0 serves; the other follows, also where a draft model proposes, and ends with it."""
    together = ("--coordinator", f"127.0.0.1:{free_port()}", "--process-count", "2")
    draft = ("--speculate", str(tiny), "--k", "1")
    processes = [start(tiny, *together, *draft, "--process-id", str(index)) for index in range(2)]
    with ended(processes):
        url = url_of(processes[0])
        wait_ready(processes[0])
        assert [ask(url, prompt).json()["choices"][0]["text"] for prompt in ("abc", "xyz")] == [
            solo(tiny, prompt) for prompt in ("abc", "xyz")
        ]
        for process in reversed(processes):  # as SLURM and Kubernetes do
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key-file", "/no/such/file"], "cannot read --api-key-file"),
        (["--host", "256.0.0.1"], "cannot listen at 256.0.0.1"),
        (["--max-len", "65"], "max_len is 65; this model allows 2 to 64"),
        (["--group", "32"], "--group and --quant-rule go with --quant"),
        (["--k", "3"], "--k goes with --speculate"),
        (["--speculate", "ngram", "--k", "0"], "--k is 0; a pass takes from 1 to 15 proposals"),
        (["--speculate", "ngram", "--k", "9", "--max-len", "9"], "k is 9, and a request has room for 9 positions"),
        (["--speculate", "/no/such/draft"], "no file or folder"),
    ],
)
def test_wrong_usage(tiny: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["--model", str(tiny), "--tp", "1", "--port", "0", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_a_port_in_use_is_told_before_anything_slow(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert main(["--model", "/no/such/model", "--port", str(port)]) == 1
    assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in capsys.readouterr().err
