"""The routes: OpenAI's, and those that an operator's tools ask."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from model.tokenizer import Tokenizer
from serve.choice import Choice
from serve.delivery import Delivery
from serve.errors import RATE_LIMIT, SERVER, ApiError, internal, of_validation, shortened
from serve.generation import EngineLike, Generation, now
from serve.inbox import Inbox
from serve.limits import Limits, read_json_body
from serve.metrics import CONTENT_TYPE, Metrics
from serve.planning import Plan, Planner
from serve.replies import ChatReply, CompletionReply, Reply
from serve.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest

Asked = TypeVar("Asked", bound=GenerationRequest)


class Service:
    """One model behind HTTP.

    Args:
        engine: started, or starting: until it is ready, requests get 503.
        name: what clients call the model.
        api_keys: any of them opens /v1; none: no key is asked for.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        name: str,
        *,
        api_keys: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.name = engine, tokenizer, name
        self.limits = limits or Limits()
        self.draining = False
        self.open_requests = 0
        options = engine.options
        self.metrics = Metrics(engine.stats, ttft_slo_s=options.ttft_slo_s, tpot_slo_s=options.tpot_slo_s)
        self._api_keys = [key.encode() for key in api_keys]
        self._created = int(time.time())
        self._inbox = Inbox()
        self._deliveries: set[Delivery] = set()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="tokenizer")
        self._planner = Planner(tokenizer, engine.max_len, engine.vocab_size, self.limits, self._threads)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", _Keyed(self, self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", _Keyed(self, self.model), methods=["GET"]),
            Route("/v1/completions", _Keyed(self, self.completions), methods=["POST"]),
            Route("/v1/chat/completions", _Keyed(self, self.chat_completions), methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.prometheus, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {
            ApiError: lambda request, error: error.response(),
            HTTPException: _no_such_route,
            ClientDisconnect: lambda request, error: Response(status_code=499),
            Exception: lambda request, error: internal(
                "the server failed on this request; its log says how"
            ).response(),
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def cut_off(self) -> None:
        """End every answer that is still being made with an error."""
        for delivery in list(self._deliveries):
            delivery.cut_off()

    def close(self) -> None:
        """Let go of the tokenizer's threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self._planner.completion, CompletionReply)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatCompletionRequest, self._planner.chat, ChatReply)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """Whether the process is worth keeping: 503 once the engine's thread has died."""
        if self.engine.healthy():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": "the engine has stopped; restart this server"}, 503)

    async def ready(self, request: Request) -> Response:
        """Whether to send requests here: not while compiling, not while draining, not after a failure."""
        try:
            self.check_open()
        except ApiError as error:
            return JSONResponse({"status": "not ready", "reason": error.message}, 503)
        return JSONResponse({"status": "ready"})

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _generate(
        self,
        request: Request,
        schema: type[Asked],
        plan_of: Callable[[Asked], Awaitable[Plan]],
        reply_of: type[CompletionReply | ChatReply],
    ) -> Response:
        began = now()
        try:
            self.check_open()
        except ApiError:
            self.metrics.ended("refused")
            raise
        body = await read_json_body(request, self.limits)
        try:
            asked = schema.model_validate_json(body)
        except ValidationError as error:
            raise of_validation(error) from None
        if asked.model is not None:
            self._check_name(asked.model)
        plan = await plan_of(asked)
        include_usage = asked.stream_options is not None and asked.stream_options.include_usage
        reply: Reply = reply_of(self.tokenizer, self.name, plan.logprobs, include_usage)

        def generation() -> Generation:
            choices = [Choice(self.tokenizer, plan.stop, continuation=plan.continuation) for _ in plan.requests]
            return Generation(self.engine, self.metrics, self._inbox, plan.requests, choices, began)

        return Delivery(
            generation, reply, self.limits, self._deliveries, stream=asked.stream, include_usage=include_usage
        )

    def check_open(self) -> None:
        """Raises ApiError (503, 429) where no request is taken now."""
        if not self.engine.healthy():
            raise _unavailable("the engine has stopped; this server must be restarted", "engine_error")
        if self.draining:
            raise _unavailable("this server is shutting down; ask another", "shutting_down")
        if not self.engine.ready():
            raise _unavailable("this server is still compiling; come again", "starting")
        if self.open_requests > self.limits.requests:
            raise ApiError(
                429,
                f"{self.open_requests} requests are open, and this server holds {self.limits.requests} at most",
                kind=RATE_LIMIT,
                code="rate_limit_exceeded",
                retry_after_s=1,
            )

    def check_key(self, request: Request) -> None:
        """Raises ApiError (401) where a key is asked for and none of ours came."""
        if not self._api_keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # All are compared, each in constant time: how long it takes tells nothing.
        raw = given.strip().encode("latin-1")  # as headers are decoded
        matches = [hmac.compare_digest(raw, key) for key in self._api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"the model {shortened(name, 80)!r} does not exist here; this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "shardstream",
            "max_model_len": self.engine.max_len,
        }


class _Keyed:
    """An endpoint behind the API key. It counts as open until its answer is sent."""

    def __init__(self, service: Service, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        self._service.check_key(request)
        self._service.open_requests += 1
        try:
            response = await self._endpoint(request)
            await response(scope, receive, send)
        finally:
            self._service.open_requests -= 1


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, kind=SERVER, code=code, retry_after_s=5)


def _no_such_route(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}: {request.method} {request.url.path}"
    return ApiError(error.status_code, message, code="unknown_url", headers=error.headers).response()
