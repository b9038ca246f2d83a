"""The page at `/`: a chat in the browser, and a document with a picture of what was kept of it.

One HTML file, put together once out of those in `static`; it fetches nothing but this server's own answers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ...cache.policies import POLICIES
from .kept import kept_tokens

if TYPE_CHECKING:
    from .service import Service

SCRIPTS = ("picture.js", "chat.js")
FIND = "const $ = name => document.getElementById(name);\n"


def page() -> tuple[str, dict[str, str]]:
    """The page and the headers that it is sent with: nothing that is not in it is run, shown or asked."""
    folder = files(__package__) / "static"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    style = f"\n{read('page.css')}"
    script = "\n" + FIND + "\n".join(read(name) for name in SCRIPTS)
    told = json.dumps({"policies": list(POLICIES)}).replace("<", "\\u003c")
    html = read("page.html")
    for name, text in (("style", style), ("server", told), ("script", script)):
        html = html.replace(f"{{{{ {name} }}}}", text)
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return html, headers


def add_page(app: FastAPI, service: Service) -> None:
    """The page, and what it shows of a document."""
    html, headers = page()

    @app.get("/")
    async def root() -> Response:
        return HTMLResponse(html, headers=headers)

    @app.get("/v1/documents/{name}/kept")
    async def kept(name: str) -> Response:
        document, tokenizer = service.shelf.get(name).document, service.engine.text_tokenizer()
        told: dict[str, Any] = await asyncio.to_thread(kept_tokens, document, tokenizer)
        return JSONResponse({"id": name, "object": "document.kept", **told})


def _hash(text: str) -> str:
    """How a Content-Security-Policy names an inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
