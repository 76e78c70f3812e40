"""The static files of the page, and the landing page that leads there."""

from __future__ import annotations

import gzip
import hashlib
import html
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from experience_buffer_server.web.answers import json_answer
from experience_buffer_server.web.problems import missing, wants_page

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of the page: files of this server and nothing else, and no script or style within a page."""
_TYPES: Final = {".js": "text/javascript", ".mjs": "text/javascript", ".woff2": "font/woff2"}
"""Where the machine's table of types may say otherwise."""
_LINKS: Final = {
    "/ui/": "the page: look into the buffers",
    "/api/v1/status": "the same as JSON begins here",
    "/openapi.json": "all of it, described for programs",
    "/metrics": "for Prometheus",
    "/health": "whether it serves",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, as it was when it was read last."""

    state: tuple[int, int]
    content: bytes
    compressed: bytes
    """As gzip writes it: two fifths of the size."""
    tag: str


class Pages:
    """The files below a folder, by their names at the start. Belongs to the event loop.

    One that has changed on the disk is read again; they are few and small.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._paths = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith(".")
        }
        self._read: dict[str, StaticFile] = {}

    def answer(self, request: Request, name: str) -> Response:
        """A file; an address within the page leads to where its script reads that: behind a "#"."""
        if name not in self._paths:
            if not wants_page(request) or INDEX not in self._paths:
                return missing(request, message=f"The page has no file {name[:100]!r}.")
            asked = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"/ui/#/{quote(name)}{asked}", status_code=307)
        found = self._file(name)
        is_compressed = "gzip" in request.headers.get("accept-encoding", "").lower()
        tag = f'"{found.tag}{"-gzip" if is_compressed else ""}"'
        headers = {
            "ETag": tag,
            "Cache-Control": "no-cache",
            "Content-Security-Policy": POLICY,
            "Vary": "Accept-Encoding",
        }
        if tag in (known.strip() for known in request.headers.get("if-none-match", "").split(",")):
            return Response(status_code=304, headers=headers)
        if is_compressed:
            headers["Content-Encoding"] = "gzip"
        content = found.compressed if is_compressed else found.content
        return Response(content, headers=headers, media_type=_type_of(name))

    def _file(self, name: str) -> StaticFile:
        path = self._paths[name]
        status = path.stat()
        state = (status.st_mtime_ns, status.st_size)
        found = self._read.get(name)
        if found is None or found.state != state:
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()[:20]
            compressed = gzip.compress(content, mtime=0)
            found = self._read[name] = StaticFile(state, content, compressed, tag)
        return found


def _type_of(name: str) -> str:
    suffix = Path(name).suffix
    kind = _TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def landing(request: Request, *, has_page: bool, said: str) -> Response:
    """What stands at the address of the server: its name, and where to go from here.

    Args:
        request: The request.
        has_page: Whether the page is served.
        said: More about the server, for those who may know it.
    """
    links = {path: text for path, text in _LINKS.items() if has_page or path != "/ui/"}
    if not wants_page(request):
        return json_answer({"name": "experience-buffer", "about": said, "links": links})
    items = "".join(
        f'<li><a href="{path}"><code>{path}</code></a>: {html.escape(text)}</li>'
        for path, text in links.items()
    )
    text = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark"><title>Experience buffer</title></head>'
        f"<body><h1>Experience buffer</h1><p>{html.escape(said)}</p><ul>{items}</ul></body></html>\n"
    )
    return Response(text, headers={"Content-Security-Policy": POLICY}, media_type="text/html")


def to_page() -> Response:
    """Where somebody who left out the last slash wants to go."""
    return RedirectResponse("/ui/", status_code=307)
