"""The routes. Every answer that is an error has OpenAI's form."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from ...errors import CakeError
from .errors import ApiError, as_api_error
from .gate import Gate
from .metrics import CONTENT_TYPE
from .page import add_page
from .replying import error_response
from .service import Service

log = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The server's application; the service begins and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, options=service.options, metrics=service.metrics)
    _add_errors(app)
    _add_status(app, service)
    _add_replies(app, service)
    _add_documents(app, service)
    add_page(app, service)
    for route in app.routes:
        if isinstance(route, Route) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")  # what checks whether a server is there asks so
    return app


async def read_body(request: Request, most: int, patience: float) -> bytes:
    """The whole body. Raises ApiError: 413 for more than `most` bytes, 408 where it does not come in time."""
    body = bytearray()
    try:
        async with asyncio.timeout(patience):
            async for part in request.stream():
                if len(body) <= most:  # what is behind is read on, so that the client reads the answer
                    body += part
    except TimeoutError:
        raise ApiError(408, f"the request was not sent within {patience:g} seconds") from None
    if len(body) > most:
        raise too_large(most)
    return bytes(body)


def too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most:,} bytes, as many as this server takes", code="body_too_large")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    @app.exception_handler(CakeError)
    async def told(request: Request, error: Exception) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def wrong_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail.lower()}"
        code = "unknown_url" if error.status_code == 404 else None
        return error_response(ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error))


def _add_status(app: FastAPI, service: Service) -> None:
    scheduler = service.scheduler

    @app.get("/health")
    async def health() -> Response:
        status = "stopping" if scheduler.stopping else "ok"
        told = {"status": status, "model": service.model, "running": scheduler.running, "waiting": scheduler.waiting}
        return JSONResponse(told, status_code=503 if scheduler.stopping else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(service), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.told_model()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(service.told_model())


def _add_replies(app: FastAPI, service: Service) -> None:
    options = service.options

    def post(path: str, answer: Callable[[bytes], Awaitable[Response]]) -> None:
        async def route(request: Request) -> Response:
            return await answer(await read_body(request, options.max_body, options.patience))

        app.post(path)(route)

    post("/v1/chat/completions", service.chat)
    post("/v1/completions", service.complete)
    post("/v1/documents", service.read)


def _add_documents(app: FastAPI, service: Service) -> None:
    shelf = service.shelf

    @app.get("/v1/documents")
    async def documents() -> Response:
        return JSONResponse({"object": "list", "data": shelf.told()})

    @app.get("/v1/documents/{name}")
    async def document(name: str) -> Response:
        return JSONResponse(shelf.get(name).told())

    @app.delete("/v1/documents/{name}")
    async def delete(name: str) -> Response:
        return JSONResponse({"id": shelf.remove(name).id, "object": "document", "deleted": True})
