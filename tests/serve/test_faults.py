"""What goes wrong, and what clients and operators are told; other requests stay unharmed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from decode.batching.request import EngineError
from model.checkpoint.resolve import open_model
from model.tokenizer import Tokenizer
from serve.limits import Limits
from serve.server import bind
from tests.scripts.tiny import write_tiny
from tests.serve.fake_engine import FakeEngine
from tests.serve.live import PATIENCE_S, Live, eventually, live_server

LONG = {"prompt": "abc", "max_tokens": 500, "temperature": 0}


@contextlib.contextmanager
def serving(tokenizer: Tokenizer, hold_at: int | None = None, **options: Any) -> Iterator[Live]:
    engine = FakeEngine()
    engine.hold_at = hold_at
    try:
        with live_server(engine, tokenizer, **options) as live:
            yield live
    finally:
        engine.close()


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


def raw(live: Live, *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE_S)
    connection.connect(("127.0.0.1", live.port))
    return connection


def request_bytes(body: dict[str, Any], path: str = "completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        (b"", "not valid JSON", "invalid_json"),
        (b'{"prompt": "a"', "not valid JSON", "invalid_json"),
        (b'{"prompt": "a\xff"}', "not valid JSON", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "not valid JSON", "invalid_json"),
        (b"[" * 100_000, "not valid JSON", "invalid_json"),
        (b"[]", "must be a JSON object", "invalid_type"),
        (b"null", "must be a JSON object", "invalid_type"),
        (b"{}", "missing required parameter: prompt", "missing_required_parameter"),
        (b'{"prompt": null}', "missing required parameter: prompt", "missing_required_parameter"),
        (b'{"prompt": 3}', "prompt: Input should be a valid string, or: ", "invalid_value"),
        (b'{"prompt": [1, "a"]}', "prompt: ", "invalid_value"),
        (b'{"prompt": [true]}', "prompt: ", "invalid_value"),
        (b'{"prompt": "a", "temperature": "hot"}', "valid number (given: 'hot')", "invalid_value"),
        (b'{"prompt": "a", "temperature": NaN}', "finite number", "invalid_value"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite number", "invalid_value"),
        (b'{"prompt": "a", "n": 1.5}', "n: Input should be a valid integer", "invalid_value"),
        (b'{"prompt": "a", "n": "1"}', "n: Input should be a valid integer", "invalid_value"),
        (b'{"prompt": "a", "n": 0}', "n: Input should be greater", "invalid_value"),
        (b'{"prompt": "a", "max_tokens": 0}', "max_tokens: Input should be greater", "invalid_value"),
        (b'{"prompt": "a", "max_tokens": %s}' % (b"9" * 4300), "max_tokens: Input should be less", "invalid_value"),
        (b'{"prompt": ["a", "b"], "n": %s}' % (b"9" * 4300), "n: Input should be less", "invalid_value"),
        (b'{"prompt": "a", "logprobs": 21}', "logprobs: Input should be less than or equal to 20", "invalid_value"),
        (b'{"prompt": "a", "%s": 1}' % (b"9" * 4300), "unrecognized request argument", "unknown_parameter"),
        (b'{"prompt": "a", "stream": 1}', "stream: Input should be a valid boolean", "invalid_value"),
        (b'{"prompt": "a", "stop": [""]}', "stop: at most 16 strings", "invalid_value"),
        (b'{"prompt": "a", "stop": ["a", "b"], "seed": 99999999999999999999}', "seed: ", "invalid_value"),
        (b'{"prompt": "a", "logit_bias": {"a": 1}}', "'a' is not a token id", "invalid_value"),
        (b'{"prompt": "a", "logit_bias": {"1": 101}}', "less than or equal to 100", "invalid_value"),
        (b'{"prompt": "a", "logit_bias": {"%s": 1}}' % (b"9" * 9000), "is not a token id", "invalid_value"),
        (b'{"prompt": "a", "stream_options": {}}', "only allowed with stream", None),
        (
            b'{"prompt": "a", "top_logprobs": 2}',
            "unrecognized request argument supplied: top_logprobs",
            "unknown_parameter",
        ),
        (b'{"prompt": "a", "best_of": 4}', "best_of is not supported", "unsupported_parameter"),
        (b'{"prompt": "a", "echo": true}', "echo is not supported", "unsupported_parameter"),
    ],
)
def test_malformed_requests(live: Live, body: bytes, message: str, code: str | None) -> None:
    response = live.post("completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert message in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert len(error["message"]) < 500  # what was given is not sent back whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": "hello"}, "messages: "),
        ({"messages": [{"content": "a"}]}, "missing required parameter: messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages: "),
        ({"messages": [{"role": "user", "content": 3}]}, "messages: "),
        ({"top_logprobs": 2}, "only allowed with logprobs"),
        ({"logprobs": 2}, "logprobs: Input should be a valid boolean"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ; give one"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format is not supported"),
        ({"chat_template": "{{ messages }}"}, "unrecognized request argument supplied: chat_template"),
    ],
)
def test_malformed_chats(live: Live, change: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    response = live.post("chat/completions", json=body | change)
    assert response.status_code == 400
    assert message in error_of(response)["message"]


def test_fields_that_ask_for_nothing_are_taken(live: Live) -> None:
    nothing = {
        "user": "me", "metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": "none", "n": None,
        "presence_penalty": 0, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "stop": None, "top_k": -1,
        "parallel_tool_calls": True, "service_tier": "auto", "max_tokens": 2, "max_completion_tokens": 2,
    }  # fmt: skip
    body = {"messages": [{"role": "user", "content": "a", "name": "me", "refusal": None}]}
    assert live.post("chat/completions", json=body | nothing).status_code == 200


def test_wrong_addresses(live: Live) -> None:
    for response, status in (
        (live.get("/v1/nothing"), 404),
        (live.get("/v1/completions"), 405),
        (live.post("completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415),
        (live.post("completions", content=b"{}"), 415),
        (live.post("completions", json={"prompt": "a"}, headers={"Content-Encoding": "gzip"}), 415),
    ):
        assert response.status_code == status
        assert error_of(response)["type"] == "invalid_request_error"


def test_api_keys(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, api_keys=["first", "s\u00e9cond"]) as live:
        for given in (None, "first", "Bearer", "Bearer wrong", "Basic first", "Bearer first2"):
            response = live.get("/v1/models", headers={} if given is None else {"Authorization": given})
            assert response.status_code == 401, given
            assert error_of(response)["code"] == "invalid_api_key"
        for key in ("first", "s\u00e9cond"):
            assert live.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()}).status_code == 200
        for path in ("/health", "/ready", "/metrics"):  # probes and scrapers have no key
            assert live.get(path).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_huge_bodies_are_not_read(tokenizer: Tokenizer, declared: bool) -> None:
    with serving(tokenizer, limits=Limits(body_bytes=1000)) as live:
        content: Any = b" " * 5000 if declared else iter([b" " * 500] * 10)
        response = live.post("completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert "larger than the 1,000 bytes" in error_of(response)["message"]
        assert live.post("completions", json={"prompt": "abc", "max_tokens": 1}).status_code == 200


def test_a_body_that_does_not_come(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, limits=Limits(body_s=0.05)) as live, raw(live) as slow:
        slow.sendall(request_bytes(LONG)[:-5])
        assert read_all(slow).startswith(b"HTTP/1.1 408")
        eventually(lambda: live.service.open_requests == 0)


def test_headers_that_do_not_come(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, limits=Limits(headers_s=0.05)) as live, raw(live) as silent:
        assert read_all(silent) == b""
        # This one may be closed before it begins, where the machine stops.
        with contextlib.suppress(ConnectionError), raw(live) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost")
            assert read_all(slow)[:12] in (b"HTTP/1.1 408", b"")


def test_refusals_unread_are_counted(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as live:
        live.engine.is_ready = False
        assert live.post("completions", json=LONG).status_code == 503
        assert 'shardstream_requests_total{outcome="refused"} 1.0' in live.get("/metrics").text


def test_headers_without_end_are_refused(live: Live) -> None:
    with raw(live) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\nA: ")
        with contextlib.suppress(ConnectionError):  # the server may close while we still send
            for _ in range(40):
                endless.sendall(b"a" * 4096)
        with contextlib.suppress(ConnectionError):
            assert read_all(endless).startswith(b"HTTP/1.1 400")


def test_what_is_no_http_is_refused(live: Live) -> None:
    with raw(live) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
def test_a_client_that_leaves_frees_its_pages(tokenizer: Tokenizer, stream: bool, how: str) -> None:
    """A half-closed connection counts as left, as it does for nginx: nothing tells it from a closed one in time."""
    with serving(tokenizer, hold_at=2) as live:
        connection = raw(live)
        connection.sendall(request_bytes({**LONG, "stream": stream, "n": 2, "ignore_eos": True}))
        eventually(lambda: live.engine.stats().running == 2)
        if how == "half-close":
            connection.shutdown(socket.SHUT_WR)
        else:
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        eventually(lambda: live.engine.stats().running == 0)
        assert len(live.engine.cancelled) == 2
        assert live.engine.stats().pages_used == 0
        eventually(lambda: live.service.open_requests == 0)
        assert 'shardstream_requests_total{outcome="cancelled"} 2.0' in live.get("/metrics").text
        connection.close()


def test_a_client_that_leaves_while_it_waits_for_its_first_token(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as live:
        live.engine.open.clear()
        with raw(live) as connection:
            connection.sendall(request_bytes({**LONG, "stream": True}))
            eventually(lambda: live.engine.stats().running == 1)
        eventually(lambda: live.engine.stats().running == 0)
        live.engine.open.set()


MUCH = {"prompt": "abc", "max_tokens": 500, "n": 16, "logprobs": 20, "stream": True}
"""More than a connection holds that nobody reads."""


def test_a_slow_reader_holds_up_nobody(tokenizer: Tokenizer) -> None:
    """The engine never waits for a reader: it fills its connection, and the rest of its text waits."""
    with serving(tokenizer) as live, raw(live, receive_buffer=4096) as slow:
        slow.sendall(request_bytes(MUCH))
        eventually(lambda: live.engine.stats().completed == 16)
        assert live.post("completions", json=LONG).status_code == 200
        assert live.engine.stats().pages_used == 0
        eventually(lambda: live.service.open_requests == 1)  # the second is counted out after its answer


def test_a_reader_that_takes_nothing_is_let_go(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, limits=Limits(send_s=0.2)) as live, raw(live, receive_buffer=4096) as slow:
        slow.sendall(request_bytes(MUCH))
        eventually(lambda: live.engine.stats().submitted == 16)
        eventually(lambda: live.service.open_requests == 0)
        assert live.engine.stats().pages_used == 0


def test_a_poisoned_prompt_fails_alone(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, hold_at=2) as live:
        answers: list[httpx.Response] = []
        other = threading.Thread(target=lambda: answers.append(live.post("completions", json=LONG)))
        other.start()
        eventually(lambda: live.engine.stats().running == 1)
        response = live.post("completions", json={"prompt": "abc~"})
        assert response.status_code == 500
        assert error_of(response) == {
            "message": "the model produced NaN or infinite logits for this request",
            "type": "server_error",
            "param": None,
            "code": "numerics_error",
        }
        live.engine.hold_at = None
        other.join()
        assert answers[0].json()["choices"][0]["text"] == ("abc" * 200)[:500]
        assert live.get("/health").status_code == 200


def test_the_engine_dies(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, hold_at=2) as live:
        with live.http.stream("POST", f"{live.url}/v1/completions", json={**LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "a"
            live.engine.die()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert "an unforeseen fault" in error["message"]
        for path in ("/health", "/ready"):
            response = live.get(path)
            assert response.status_code == 503
            assert "the engine has stopped" in response.json()["reason"]
        response = live.post("completions", json=LONG)
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_error"
        eventually(lambda: 'shardstream_requests_total{outcome="failed"} 1.0' in live.get("/metrics").text)


def test_an_engine_that_closes_between_the_check_and_the_submission(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as live:

        def submit(*_: Any) -> None:
            raise EngineError("the engine drains")

        live.engine.submit = submit
        response = live.post("completions", json=LONG)
        assert (response.status_code, error_of(response)["message"]) == (503, "the engine drains")


def test_a_fault_of_ours_is_a_500_and_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as live:
        second = live.engine.submit

        def submit(request: Any, on_event: Any) -> Any:
            if request.sampling.seed % 2:
                raise KeyError("unforeseen")
            return second(request, on_event)

        live.engine.open.clear()
        live.engine.submit = submit
        response = live.post("completions", json={**LONG, "n": 2, "seed": 2})
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
        assert live.engine.stats().running == 0  # the first of the two was taken back
        live.engine.open.set()


@pytest.mark.parametrize(
    ("template", "status", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", 400, "refused the chat: roles must alternate"),
        ("{{ messages[0].content + 1 }}", 400, "the chat template failed: TypeError"),
        (
            "{{ messages.__class__.__mro__ }}",
            400,
            "the chat template refused the chat: access to attribute '__class__'",
        ),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", 400, "unsafe"),
        ("{{ 'a' * 99999999999 }}", 400, "it repeated a value"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            400,
            "ran through more than",
        ),
        (None, 400, "has no chat template; use /v1/completions"),
    ],
)
def test_templates_that_fail(tmp_path: Path, template: str | None, status: int, message: str) -> None:
    folder = write_tiny(tmp_path / "model", chat=False)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with serving(open_model(str(folder)).load_tokenizer()) as live:
        response = live.post("chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
        assert response.status_code == status
        assert message in error_of(response)["message"]
        assert live.post("completions", json={"prompt": "abc", "max_tokens": 1}).status_code == 200


def test_too_many_open_requests(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, limits=Limits(requests=1)) as live, raw(live) as first:
        live.engine.open.clear()
        first.sendall(request_bytes(LONG))
        eventually(lambda: live.engine.stats().running == 1)
        response = live.post("completions", json=LONG)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert live.get("/health").status_code == 200
        live.engine.open.set()


def test_before_the_engine_is_ready(tokenizer: Tokenizer) -> None:
    with serving(tokenizer) as live:
        live.engine.is_ready = False
        assert live.get("/health").status_code == 200
        assert live.get("/ready").status_code == 503
        response = live.post("completions", json=LONG)
        assert (response.status_code, error_of(response)["code"]) == (503, "starting")
        assert "retry-after" in response.headers


def test_draining_finishes_what_runs_and_refuses_what_comes(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, hold_at=2) as live:
        answers: list[httpx.Response] = []
        running = threading.Thread(target=lambda: answers.append(live.post("completions", json=LONG)))
        running.start()
        eventually(lambda: live.engine.stats().running == 1)
        live.stop()
        eventually(lambda: live.service.draining)
        assert live.get("/ready").json()["reason"] == "this server is shutting down; ask another"
        response = live.post("completions", json=LONG)
        assert (response.status_code, error_of(response)["code"]) == (503, "shutting_down")
        assert live.get("/health").status_code == 200
        live.engine.hold_at = None
        running.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 500
        live.thread.join(PATIENCE_S)
        with pytest.raises(httpx.ConnectError):
            live.get("/health")


def test_an_address_is_held_before_it_is_listened_at(tokenizer: Tokenizer) -> None:
    """And given back at once: what lingers of a server's connections does not keep its successor out."""
    with bind("127.0.0.1", 0) as held, pytest.raises(OSError, match="Address already in use"):
        bind("127.0.0.1", held.getsockname()[1])
    with serving(tokenizer) as live:
        assert live.get("/health", headers={"Connection": "close"}).status_code == 200
    bind("127.0.0.1", live.port).close()


def test_what_outlasts_the_drain_is_told_so(tokenizer: Tokenizer) -> None:
    with serving(tokenizer, hold_at=2, drain_s=0.01) as live, raw(live) as stream, raw(live) as whole:
        stream.sendall(request_bytes({**LONG, "stream": True}))
        assert b"data: " in b"".join(iter(lambda: stream.recv(1), b"{"))
        whole.sendall(request_bytes(LONG))
        eventually(lambda: live.engine.stats().running == 2)
        live.stop()
        head, _, body = read_all(whole).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        error = {"message": "this server is shutting down; ask another", "code": "engine_error"}
        assert json.loads(body)["error"].items() >= error.items()
        *_, last, done = [line for line in read_all(stream).decode().split("\r\n") if line.startswith("data: ")]
        assert json.loads(last.removeprefix("data: "))["error"].items() >= error.items()
        assert done.strip() == "data: [DONE]"
        assert live.engine.stats().running == 0


def test_tokens_are_sent_at_once(live: Live) -> None:
    """Without Nagle's algorithm, which would hold a token until the client has acknowledged the one before."""
    import gc

    live.engine.open.clear()  # so the connection is there as long as it takes to look at it
    try:
        with raw(live) as connection:
            connection.sendall(request_bytes(LONG))
            eventually(lambda: live.engine.stats().running == 1)
            ours = connection.getsockname()
            others = [one for one in gc.get_objects() if isinstance(one, socket.socket) and one is not connection]
            assert [delay for one in others if (delay := _no_delay(one, ours)) is not None] == [1]
        eventually(lambda: live.engine.stats().running == 0)
    finally:
        live.engine.open.set()


def _no_delay(one: socket.socket, peer: Any) -> int | None:
    """Its option, of a connection to ``peer``; None for all others, which may close at any moment."""
    try:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) if one.getpeername() == peer else None
    except OSError:
        return None
