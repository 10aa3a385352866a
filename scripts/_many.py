"""Many prompts through the batching engine: each joins when there is room and leaves when it is done."""

from __future__ import annotations

import queue
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from decode.batching.engine import Engine
from decode.batching.options import EngineOptions, EngineStats
from decode.batching.request import Event, Request
from decode.decoder import Decoder, NumericsError
from decode.sampling import SamplingParams
from decode.speculation.draft import DraftModel
from decode.text import Completion, RowText
from model.tokenizer import Tokenizer
from model.wording import number_of, prompt_at


@dataclass(frozen=True)
class ManyRun:
    """What came of many prompts, in their order.

    seconds: from the first submission to the last token, with everything compiled.
    first_s: until the first token; None where none came.
    tpots_s: mean seconds a token after the first, of each prompt that has two.
    """

    completions: list[Completion]
    seconds: float
    first_s: float | None
    tpots_s: list[float]
    stats: EngineStats

    def facts(self) -> dict[str, Any]:
        """The JSON fields of this run."""
        return {
            "seconds": self.seconds,
            "first_token_s": self.first_s,
            "tpot_s": statistics.median(self.tpots_s) if self.tpots_s else None,
            "tokens_per_s": self.stats.generated_tokens / self.seconds,
            "engine": {**asdict(self.stats), "shapes_s": self._shapes()},
        }

    def _shapes(self) -> list[dict[str, float]]:
        """Each shape that steps ran in, as JSON, which has no pairs as keys."""
        return [
            {"rows": rows, "prompt_tokens": prompt, "s": seconds, "predicted_s": predicted}
            for (rows, prompt), (seconds, predicted) in sorted(self.stats.shapes_s.items())
        ]

    def check_complete(self) -> None:
        """Raises NumericsError for the prompts whose completion is an error."""
        failed = [place for place, one in enumerate(self.completions) if one.error is not None]
        if failed:
            rest = ", and all others are complete" if len(failed) < len(self.completions) else ""
            raise NumericsError(
                f"{number_of(len(failed), 'prompt')} failed{rest}; the first is "
                f"{prompt_at(failed[0], len(self.completions))}: {self.completions[failed[0]].error}"
            )

    def report_lines(self, batch: int) -> list[str]:
        """The same for people."""
        stats = self.stats
        tpot = f"; TPOT {statistics.median(self.tpots_s) * 1e3:.1f} ms (median of prompts)" if self.tpots_s else ""
        found = [
            f"prompts   {len(self.completions):,}, at most {batch} at a time, in {self.seconds:.1f} s",
            f"tokens    {stats.generated_tokens:,}, {stats.generated_tokens / self.seconds:.1f} a second{tpot}",
            f"prefixes  {stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens were in the cache already",
            f"steps     {stats.steps:,}; {stats.step_s * 1e3:.1f} ms each lately, {stats.host_s * 1e3:.2f} of host CPU",
        ]
        if stats.proposed_tokens:
            found.append(f"speculate {stats.accepted_tokens:,} of {stats.proposed_tokens:,} proposed tokens stood")
        return found


def run_many(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    max_new_tokens: int,
    max_len: int,
    sampling: SamplingParams,
    stop: Sequence[str],
    continuation: Sequence[bool],
    progress: bool,
    done: Callable[[int, Completion], None],
    proposals: int = 0,
    draft: DraftModel | None = None,
) -> ManyRun | None:
    """Complete every prompt, ``batch`` at a time at most; see ``decode.text.TextGeneration`` for the rest.

    None on every process but 0, which does what process 0 decides.

    done: called for each prompt in the order given, once it and all before it have ended.
    proposals, draft: speculation; see ``decode.batching.engine.Engine``.

    A prompt on which the model produces NaN fails alone: its completion says so, and the rest go on.

    Raises:
        EngineError: as the engine ends a request.
    """
    options = EngineOptions(max_batch=batch, max_len=max_len, max_queue=len(prompts), proposals=proposals)
    engine = Engine(decoder, options, draft)
    if jax.process_index() != 0:
        engine.follow()
        return None
    engine.start()
    completions = [Completion(len(prompt)) for prompt in prompts]
    rows = [
        RowText(tokenizer, completion, stop, continuation=keep)
        for completion, keep in zip(completions, continuation, strict=True)
    ]
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    times: list[list[float]] = [[] for _ in prompts]  # of the first and the newest token
    began = time.perf_counter()
    bar = Progress(
        TextColumn("prompts"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not progress or not sys.stderr.isatty(),
        redirect_stdout=False,
        redirect_stderr=False,
    )
    try:
        tickets = []
        for place, prompt in enumerate(prompts):
            request = Request(
                prompt,
                min(max_new_tokens, max_len - len(prompt)),
                sampling=sampling,
                stop_token_ids=tokenizer.stop_token_ids,
            )

            def on_event(event: Event, place: int = place) -> None:
                events.put((place, event))

            tickets.append(engine.submit(request, on_event))
        shown, left = 0, len(prompts)
        with bar:
            task = bar.add_task("prompts", total=len(prompts))
            while left:
                place, event = events.get()
                completion = completions[place]
                if event.error is not None and not isinstance(event.error, NumericsError):
                    raise event.error
                if event.token is not None and completion.finish_reason is None:
                    times[place] = [*times[place][:1], event.at]
                    rows[place].push(event.token, event.logprob)
                    if completion.finish_reason and not event.finish_reason:
                        engine.cancel(tickets[place].id)  # a stop string, which the engine knows nothing of
                if event.finish_reason:
                    if completion.finish_reason is None:  # else it ended before, at a stop string
                        rows[place].finish("length" if event.error is None else "error")
                        if completion.finish_reason == "error":
                            completion.error = str(event.error)
                    left -= 1
                    bar.advance(task)
                    while shown < len(prompts) and completions[shown].finish_reason:
                        done(shown, completions[shown])
                        shown += 1
        seconds = time.perf_counter() - began
        tpots = [
            (last - first) / (len(completion.token_ids) - 1)
            for (first, last), completion in zip((t for t in times if len(t) == 2), _of_two(completions), strict=True)
        ]
        first = min((t[0] for t in times if t), default=None)
        return ManyRun(completions, seconds, None if first is None else first - began, tpots, engine.stats())
    finally:
        engine.close()


def _of_two(completions: Sequence[Completion]) -> list[Completion]:
    return [completion for completion in completions if len(completion.token_ids) > 1]
