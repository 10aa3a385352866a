"""Errors as OpenAI's API words them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

MOST_CHARACTERS = 480
"""Of a message, most of which may be what the client sent: it is not to get all of that back."""

INVALID, SERVER, RATE_LIMIT = "invalid_request_error", "server_error", "rate_limit_error"


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: the HTTP status.
        kind: OpenAI's ``type``; clients choose their exception by status.
        param: the field to blame.
        code: a word that programs can compare with.
        retry_after_s: when to come again; sent as ``Retry-After`` in whole seconds, rounded up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code
        self.message, self.param = shortened(message, MOST_CHARACTERS), None if param is None else shortened(param, 80)
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: something in the request that the client can mend."""
    return ApiError(400, message, param=param, code=code)


def internal(message: str) -> ApiError:
    """500: a fault of ours, after which uvicorn closes the connection."""
    return ApiError(500, message, kind=SERVER, code="internal_error", headers={"Connection": "close"})


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that pydantic found wrong, with the field's path and what was given."""
    found = error.errors(include_url=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if not first["loc"]:
        return invalid(f"the body must be a JSON object: {first['msg']}", code="invalid_type")
    path, param = ".".join(str(part) for part in first["loc"]), str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return invalid(f"unrecognized request argument supplied: {path}", path, "unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"missing required parameter: {path}", path, "missing_required_parameter")
    # A field of several forms ("text or list of texts") has an error for each form, and the path names the form.
    forms = list(dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in found if one["loc"][0] == param))
    given = shortened(repr(first["input"]), 80)
    return invalid(f"{param}: {', or: '.join(forms)} (given: {given})", param, "invalid_value")


def shortened(text: str, most: int) -> str:
    """A text, or its beginning and an ellipsis: ``most`` characters in all."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
