"""Servers as child processes: ours and llama.cpp's, started, waited for, asked, and ended."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts._cli import UsageError

START_S = 600.0
"""How long a server may take to be ready: it compiles."""

END_S = 20.0
PEER_PARTS = ("fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings", "yaml")
"""What llama.cpp's server imports beyond the bindings."""


@dataclass(frozen=True)
class Server:
    """url: where it listens. extra: fields that make it generate exactly as many tokens as it is asked for."""

    name: str
    url: str
    extra: dict[str, Any]

    def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        """A whole greedy answer. Raises OSError with what it said where it is none."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **self.extra}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=START_S) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise OSError(f"{self.name} answered {error.code}: {error.read()[:300].decode(errors='replace')}") from None

    def text(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=START_S) as response:
            return str(response.read().decode())


def check_peer_server() -> None:
    """Raises UsageError where llama.cpp's server cannot start for lack of a package."""
    missing = [name for name in PEER_PARTS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"llama.cpp's server needs {', '.join(missing)}: pip install -e '.[peers]'")


@contextmanager
def our_server(model: Path, options: Sequence[str]) -> Iterator[Server]:
    """``scripts.serve`` on a free port of loopback, ready."""
    port = _free_port()
    command = ["-m", "scripts.serve", "--model", str(model), "--served-name", "ours", "--port", str(port), *options]
    server = Server("shardstream", f"http://127.0.0.1:{port}", {"ignore_eos": True})
    with _running(server, command, "/ready"):
        yield server


@contextmanager
def peer_server(model: Path, *, threads: int, context: int, end_tokens: Sequence[int]) -> Iterator[Server]:
    """llama.cpp's server, ready. It runs one request at a time; by default a new one cuts the running one off.

    end_tokens: those that would end an answer; they are biased away, as the server knows no ``ignore_eos``.
    """
    port = _free_port()
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_ctx": context,
        "interrupt_requests": "false",
        "logits_all": "false",  # by default it computes and keeps the logits of every prompt token
        "verbose": "false",
    }
    command = ["-m", "llama_cpp.server", *(str(part) for key, value in options.items() for part in (f"--{key}", value))]
    bias = {"logit_bias": {str(token): -100 for token in end_tokens}}
    server = Server("llama.cpp", f"http://127.0.0.1:{port}", bias)
    with _running(server, command, "/v1/models"):
        yield server


@contextmanager
def _running(server: Server, command: Sequence[str], ready: str) -> Iterator[None]:
    """Raises OSError with the end of what it wrote where it ends early or is not ready in time."""
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen([sys.executable, *command], stdout=written, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + START_S
            while not _answers(server, ready):
                if process.poll() is not None or time.monotonic() > until:
                    written.seek(0)
                    said = written.read()[-2000:].decode(errors="replace")
                    how = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
                    raise OSError(f"the server of {server.name} {how}; the end of what it wrote:\n{said}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(server: Server, path: str) -> bool:
    try:
        server.text(path)
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])
