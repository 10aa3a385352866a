"""Text out of tokens, as they arrive: streaming detokenisation, stop strings, and why each row ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from decode.decoder import Arrival
from decode.sampling import SamplingParams
from decode.timing import Timing
from model.tokenizer import StopStrings, Tokenizer


class Generator(Protocol):
    """What makes tokens: ``decode.decoder.Decoder``, or one that speculates."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        max_len: int | None = None,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] = (),
        steps_per_dispatch: int | None = None,
    ) -> Iterator[Arrival]:
        """See ``Decoder.generate``."""
        ...


@dataclass
class Completion:
    """What one prompt led to.

    token_ids: the generated tokens, the stop token included where one ended the row.
    logprobs: each token's log-probability under the model's own distribution at temperature 1.
    text: the tokens' text, without the stop token or the stop string.
    finish_reason: "stop" (a stop token or stop string), "length" (max_new_tokens or max_len), "error", None while
        running.
    error: what went wrong, where that is the reason.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length", "error"] | None = None
    error: str | None = None


class RowText:
    """The text of one prompt's output as its tokens arrive, kept in ``completion``.

    Args:
        stop: stop strings; the text ends where the first of them begins.
        continuation: see ``TextGeneration``.
    """

    def __init__(self, tokenizer: Tokenizer, completion: Completion, stop: Sequence[str], *, continuation: bool):
        self.completion = completion
        self._stop_token_ids = frozenset(tokenizer.stop_token_ids)
        self._stream, self._stops = tokenizer.stream(continuation=continuation), StopStrings(list(stop))

    def push(self, token: int, logprob: float) -> str:
        """One generated token -> the text that is now certain."""
        completion = self.completion
        if completion.finish_reason:  # decoded past a stop string before the host saw it
            return ""
        completion.token_ids.append(token)
        completion.logprobs.append(logprob)
        if token in self._stop_token_ids:
            return self.finish("stop")
        text = self._stops.push(self._stream.push(token))
        completion.text += text
        if self._stops.stopped:
            completion.finish_reason = "stop"
        return text

    def finish(self, reason: Literal["stop", "length", "error"]) -> str:
        """The end, for ``reason`` unless a stop string is found in what is left: the last of the text."""
        text = self._stops.push(self._stream.flush())
        if not self._stops.stopped:
            text += self._stops.flush()
        self.completion.text += text
        self.completion.finish_reason = "stop" if self._stops.stopped else reason
        return text


class TextGeneration:
    """One batch of prompts being completed. Iterate for (row, new text) pairs; then read the results.

    Args:
        prompts: token ids, one list a row.
        stop: stop strings; a row ends where the first of them begins.
        continuation: True where the output continues a raw prompt, False where it begins a chat turn.
            SentencePiece vocabularies keep or drop the first blank by it.
        steps_per_dispatch: see ``Decoder.generate``.

    Raises, before anything runs: the errors of ``Decoder.generate``.
    """

    def __init__(
        self,
        decoder: Generator,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        max_len: int | None = None,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        continuation: bool | Sequence[bool] = False,
        steps_per_dispatch: int | None = None,
    ):
        self.completions = [Completion(len(prompt)) for prompt in prompts]
        keeps = [continuation] * len(prompts) if isinstance(continuation, bool) else list(continuation)
        if len(keeps) != len(prompts):
            raise ValueError(f"continuation has {len(keeps)} values for {len(prompts)} prompts; give one for each")
        self._rows = [
            RowText(tokenizer, completion, stop, continuation=keep)
            for completion, keep in zip(self.completions, keeps, strict=True)
        ]
        self._arrivals = decoder.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            max_len=max_len,
            sampling=sampling,
            stop_token_ids=tokenizer.stop_token_ids,
            steps_per_dispatch=steps_per_dispatch,
        )
        self.timing = Timing(time.perf_counter())

    def __iter__(self) -> Iterator[tuple[int, str]]:
        self.timing.began = time.perf_counter()
        for arrival in self._arrivals:
            self.timing.arrived(arrival.at, arrival.steps, sum(map(len, arrival.tokens)))
            for row, (tokens, logprobs) in enumerate(zip(arrival.tokens, arrival.logprobs, strict=True)):
                text = "".join(self._rows[row].push(*one) for one in zip(tokens, logprobs, strict=True))
                if text:
                    yield row, text
            if all(completion.finish_reason for completion in self.completions):
                break
        for row, completion in enumerate(self.completions):
            if completion.finish_reason is None:
                text = self._rows[row].finish("length")
                if text:
                    yield row, text

    def run(self) -> list[Completion]:
        """Run to the end and return the completions."""
        for _ in self:
            pass
        return self.completions
