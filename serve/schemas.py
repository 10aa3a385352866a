"""What requests may hold.

A field that is unknown is refused, as OpenAI's own API does: a misspelt option that is silently dropped gives the wrong
text. Fields that ask for what this server does not do are known and refused by name, unless their value asks for
nothing (``presence_penalty: 0``), because clients send such defaults. ``null`` always means that a field is absent.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from decode.batching.request import MOST_TOP_LOGPROBS
from serve.errors import invalid

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024

NO_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields that tell OpenAI about the caller and ask for nothing: accepted, and dropped."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's that are not built -> the values that ask for nothing and so are accepted."""

ADVICE = {
    "response_format": "output is not held to a grammar; leave it out, ask for JSON in the prompt, check the answer",
    "frequency_penalty": "use repetition_penalty",
    "presence_penalty": "use repetition_penalty",
}


class _Strict(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    include_obfuscation: Literal[False] = False  # padding of chunks against who counts their bytes


Finite = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[float, Field(allow_inf_nan=False, ge=-100, le=100)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Listed = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]


class GenerationRequest(_Strict):
    """What both kinds of request share. Ranges that the sampler checks itself are not repeated here."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    max_tokens: Count | None = None
    stop: str | list[str] = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: Finite = 1.0
    top_p: Finite = 1.0
    logit_bias: dict[str, Bias] = Field(default_factory=dict)
    # Beyond OpenAI's, as vLLM names them.
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: Finite = 0.0
    repetition_penalty: Finite = 1.0
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in UNSUPPORTED.items():
            value = data.get(name)
            if value is not None and not any(value == each for each in neutral):
                raise invalid(f"{name} is not supported by this server{_advice(name)}", name, "unsupported_parameter")
        dropped = NO_EFFECT | set(UNSUPPORTED)
        return {key: value for key, value in data.items() if key not in dropped}

    @field_validator("stop", mode="after")
    @classmethod
    def _check_stops(cls, stop: str | list[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if len(stops) > MAX_STOPS or any(not 0 < len(each) <= MAX_STOP_CHARACTERS for each in stops):
            raise ValueError(f"at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARACTERS} characters")
        return stops

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _check_bias(cls, bias: dict[str, float]) -> dict[str, float]:
        for key in bias:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"{key[:20]!r} is not a token id")
        return bias

    @model_validator(mode="after")
    def _options_go_with_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed with stream: true", "stream_options")
        return self


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Listed | None = None


class ContentPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Further keys, such as ``name`` and ``tool_calls``, go to the model's template as they are."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", strict=True)

    role: str = Field(min_length=1)
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Parts are joined by line ends: the templates of text models take strings."""
        message = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {**message, "role": self.role} | ({} if content is None else {"content": content})


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Listed | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_together(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens differ; give one", "max_tokens")
        return self


def _advice(name: str) -> str:
    return f": {ADVICE[name]}" if name in ADVICE else ""
