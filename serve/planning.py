"""From a validated request to what the engine runs: prompts as tokens, sampling, bounds."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from decode.batching.request import Request
from decode.sampling import SamplingError, SamplingParams
from model.tokenizer import Tokenizer, TokenizerError
from serve.errors import ApiError, invalid
from serve.limits import Limits
from serve.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's ``max_tokens`` of a completion that gives none. A chat may fill what room there is."""

Made = TypeVar("Made")


@dataclass(frozen=True)
class Plan:
    """What one HTTP request runs: ``n`` engine requests for each prompt, side by side.

    logprobs: alternatives to show beside each token; None shows no log-probabilities.
    continuation: whether the output continues a text (or begins a chat turn).
    """

    requests: list[Request]
    stop: list[str]
    logprobs: int | None
    continuation: bool


class Planner:
    """Turns requests into plans, tokenising in threads of its own.

    Args:
        max_len: positions of prompt and output at most.
        threads: where templates and the tokenizer run; one that hangs in a template holds up no other work.
    """

    def __init__(self, tokenizer: Tokenizer, max_len: int, vocab_size: int, limits: Limits, threads: Executor) -> None:
        self._tokenizer, self._max_len, self._vocab_size = tokenizer, max_len, vocab_size
        self._limits, self._threads = limits, threads

    async def completion(self, asked: CompletionRequest) -> Plan:
        """Raises ApiError for what the client can mend."""
        prompts = await self._apart(lambda: self._prompts(asked.prompt))
        new_tokens = asked.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self._plan(asked, prompts, [new_tokens] * len(prompts), asked.logprobs, "prompt", continuation=True)

    async def chat(self, asked: ChatCompletionRequest) -> Plan:
        """Raises ApiError for what the client can mend, such as a chat that the template refuses."""
        if not self._tokenizer.has_chat_template:
            raise invalid("this model has no chat template; use /v1/completions", "messages")
        messages = [message.for_template() for message in asked.messages]
        prompt = await self._apart(
            lambda: self._tokenizer.encode_chat(messages, variables=asked.chat_template_kwargs), "messages"
        )
        new_tokens = asked.max_completion_tokens or asked.max_tokens or max(1, self._max_len - len(prompt))
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return self._plan(asked, [prompt], [new_tokens], logprobs, "messages", continuation=False)

    async def _apart(self, work: Callable[[], Made], param: str = "prompt") -> Made:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.wait_for(running, self._limits.prompt_s)
        except TimeoutError:
            raise ApiError(
                503,
                f"{param} took longer than {self._limits.prompt_s:g} s to become tokens",
                param=param,
                code="timeout",
            ) from None
        except TokenizerError as error:
            raise invalid(f"{param}: {error}", param) from None

    def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self._tokenizer.encode(prompt)]
        if not prompt:
            raise invalid("prompt is an empty list; give a text or token ids", "prompt")
        if isinstance(prompt[0], int):
            return [list(prompt)]  # type: ignore[arg-type]
        if len(prompt) > self._limits.choices:
            raise self._too_many(len(prompt))
        return [self._tokenizer.encode(one) if isinstance(one, str) else list(one) for one in prompt]  # type: ignore

    def _plan(
        self,
        asked: GenerationRequest,
        prompts: Sequence[list[int]],
        new_tokens: Sequence[int],
        logprobs: int | None,
        param: str,
        *,
        continuation: bool,
    ) -> Plan:
        if len(prompts) * asked.n > self._limits.choices:
            raise self._too_many(len(prompts) * asked.n)
        for prompt, more in zip(prompts, new_tokens, strict=True):
            if len(prompt) + more > self._max_len:
                raise invalid(
                    f"the maximum context length is {self._max_len} tokens, and {len(prompt) + more} were asked "
                    f"for: {len(prompt)} of the {param} and {more} to generate; shorten the {param} or the output",
                    param,
                    "context_length_exceeded",
                )
        bias = {int(token): value for token, value in asked.logit_bias.items()}
        if bias and max(bias) >= self._vocab_size:
            raise invalid(
                f"logit_bias has token id {max(bias)}, and this model's ids end at {self._vocab_size - 1}", "logit_bias"
            )
        seed = secrets.randbits(64) if asked.seed is None else asked.seed
        try:
            samplings = [
                SamplingParams(
                    temperature=asked.temperature,
                    top_k=max(0, asked.top_k),  # -1 is off, as elsewhere
                    top_p=asked.top_p,
                    min_p=asked.min_p,
                    repetition_penalty=asked.repetition_penalty,
                    seed=(seed + choice) % 2**64,
                )
                for choice in range(asked.n)
            ]
        except SamplingError as error:
            raise invalid(str(error), str(error).partition(" ")[0]) from None
        return Plan(
            [
                Request(
                    prompt,
                    more,
                    sampling,
                    stop_token_ids=() if asked.ignore_eos else self._tokenizer.stop_token_ids,
                    logit_bias=bias,
                    top_logprobs=logprobs or 0,
                )
                for prompt, more in zip(prompts, new_tokens, strict=True)
                for sampling in samplings
            ],
            asked.stop,  # type: ignore[arg-type]  # a list after validation
            logprobs,
            continuation,
        )

    def _too_many(self, choices: int) -> ApiError:
        return invalid(
            f"{choices} sequences in one request (prompts times n); this server makes at most {self._limits.choices}",
            "n",
        )
