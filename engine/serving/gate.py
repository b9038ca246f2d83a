"""What every request passes first: who asks, from where, and how much is sent."""

from __future__ import annotations

import hmac
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import Metrics
from .options import ServeOptions, is_loopback
from .replying import error_response

OPEN = ("/", "/health")  # need no key
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/documents", "/v1/models", "/metrics", "/health")
LATER = {"Retry-After": "1", "Connection": "close"}


class Gate:
    """Middleware: the API key, and on a loopback address the names by which a browser may call it.

    A page from elsewhere that the user's browser shows must not use the model: its requests carry its own origin, or,
    where its name was made to point here, its own host name.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        route = next((route for route in ROUTES if path == route or path.startswith(f"{route}/")), "other")

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        headers = Headers(scope=scope)
        try:
            if scope.get("state", {}).get("crowded"):
                raise ApiError(
                    503, "there are as many connections as this server takes: ask again later", headers=LATER
                )
            self._check_host(headers)
            self._check_key(path, headers)
        except ApiError as error:
            await error_response(error)(scope, receive, counting)
            return
        await self._app(scope, receive, counting)

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._options.api_key
        if key is None or path in OPEN:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise ApiError(
                401,
                "this server wants an API key: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _check_host(self, headers: Headers) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        if origin is not None and _parts(origin).netloc != host:
            raise ApiError(403, f"requests from pages of {origin} are not answered", code="foreign_origin")
        if host is None or not is_loopback(self._options.host):
            return
        name = _parts(f"//{host}").hostname or ""
        if not is_loopback(name) and name != self._options.host:
            raise ApiError(403, f"this server is not called {name}", code="foreign_host")


def _parts(url: str) -> SplitResult:
    """Raises ApiError for what is no URL."""
    try:
        return urlsplit(url)
    except ValueError:
        raise ApiError(403, f"{url} is no address", code="foreign_host") from None
