"""What becomes of many prompts' events, from an engine that tells them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode.batching.request import Event, Request, Ticket
from decode.decoder import NumericsError
from decode.sampling import SamplingParams
from model.checkpoint.resolve import open_model
from model.tokenizer import Tokenizer
from scripts._many import ManyRun, run_many
from tests.scripts.tiny import tokens_of, write_tiny

FAULT = "no numbers"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_model(str(write_tiny(tmp_path_factory.mktemp("tiny") / "model"))).load_tokenizer()


class Told:
    """An engine that gives each prompt its own tokens back, and then fails it."""

    def __init__(self, *given: Any) -> None:
        self.cancelled: list[int] = []

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> Ticket:
        for at, token in enumerate(request.prompt):
            on_event(Event(token, -1.0, (), None, None, float(at)))
        on_event(Event(None, 0.0, (), "error", NumericsError(FAULT), 9.0))
        return Ticket(0, len(request.prompt))

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)

    def start(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> None: ...


def many(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, *texts: str) -> ManyRun:
    monkeypatch.setattr("scripts._many.Engine", Told)
    unused: Any = None
    found = run_many(
        unused, tokenizer, [tokens_of(text, bos=False) for text in texts], batch=2, max_new_tokens=9, max_len=64,
        sampling=SamplingParams(), stop=["stop"], continuation=[True] * len(texts), progress=False,
        done=lambda place, completion: None,
    )  # fmt: skip
    assert found is not None
    return found


def test_a_prompt_that_had_ended_is_not_failed(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """A stop string ends it on the host; the engine is told, and what it met before that is nobody's business."""
    run = many(monkeypatch, tokenizer, "a stop and more")
    (one,) = run.completions
    assert (one.text, one.finish_reason, one.error) == ("a ", "stop", None)
    run.check_complete()


def test_a_failed_prompt_keeps_all_that_came(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """Also what was held back, as a stop string could have begun there."""
    run = many(monkeypatch, tokenizer, "b", "a sto")
    found = [(one.text, one.finish_reason, one.error) for one in run.completions]
    assert found == [("b", "error", FAULT), ("a sto", "error", FAULT)]
    with pytest.raises(NumericsError, match=r"^2 prompts failed; the first is prompt 1 of 2: no numbers"):
        run.check_complete()
