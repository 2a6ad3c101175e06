"""What a client is told when a request fails: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from typing_extensions import TypedDict

from draftproof.errors import DraftproofError, UserError


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorBody


class ApiError(DraftproofError):
    """status: HTTP; param: the request field it is about; retry_after: seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> ErrorAnswer:
        return {"error": {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 413:  # the rest of the body is not read
            headers["Connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


class FieldError(ValueError):
    """What a validator says of one field of a request, for fields that pydantic's path does not lead to."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.message, self.code = param, message, code


def kind(status: int) -> str:
    """OpenAI's `type` of an error."""
    named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def from_user_error(error: UserError, param: str | None = None) -> ApiError:
    return bad(f"{error.message}: {error.fix}", param, error.code.replace("-", "_"))


def failed(error: str) -> ApiError:
    """The engine could not go on with a request that was right."""
    return ApiError(500, error, code="engine_error")


def too_slow(seconds: float) -> ApiError:
    return ApiError(504, f"the request took longer than {seconds:g} seconds", code="timeout")


# what each status of the generating endpoints means, for the OpenAPI document
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "the request is malformed, or asks for what this server does not do",
        401: "no API key, or a wrong one",
        404: "another model than the served one was asked for",
        413: "the body is larger than the server's limit",
        415: "the body is not application/json",
        429: "too many requests are waiting; see Retry-After",
        500: "the engine failed",
        503: "the server is stopping",
        504: "the request took longer than the server's limit",
    }.items()
}


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: RESPONSES[status] for status in statuses}


class NotCompiledError(Exception):
    """A grammar that is used at once or not at all has to be compiled first."""
