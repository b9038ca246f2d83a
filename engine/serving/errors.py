"""Errors as OpenAI's clients understand them: a status, and a body with message, type, param and code."""

from __future__ import annotations

from typing import Any

from ...errors import ArenaFull, CakeError, MemoryLimit, OptionError, PromptError, SnapshotError

INVALID, AUTHENTICATION, NOT_FOUND = "invalid_request_error", "authentication_error", "not_found_error"
RATE_LIMIT, SERVER, UNAVAILABLE = "rate_limit_error", "server_error", "service_unavailable_error"
TYPES = {401: AUTHENTICATION, 404: NOT_FOUND, 429: RATE_LIMIT, 500: SERVER, 503: UNAVAILABLE}


class ApiError(Exception):
    """An answer that is an error. `param` is the field of the request that it is about, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": TYPES.get(self.status, SERVER if self.status >= 500 else INVALID),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it stands."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception: the engine's own messages as they are, of others that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ArenaFull):
        return ApiError(429, str(error), code="arena_full", headers={"Retry-After": "1"})
    if isinstance(error, MemoryLimit):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (PromptError, OptionError, SnapshotError)):
        code = "context_length_exceeded" if "context is" in str(error) else None
        return ApiError(400, str(error), code=code)
    if isinstance(error, CakeError):
        return ApiError(500, str(error))
    return ApiError(500, f"the server failed: {type(error).__name__}; its log says more")
