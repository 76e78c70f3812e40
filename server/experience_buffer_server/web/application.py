"""The HTTP application: all routes, put together."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from experience_buffer_server import __version__
from experience_buffer_server.web import pages
from experience_buffer_server.web.answers import json_answer
from experience_buffer_server.web.api.buffers import add_buffers
from experience_buffer_server.web.api.events import add_events
from experience_buffer_server.web.api.experiences import add_experiences
from experience_buffer_server.web.api.groups import add_groups
from experience_buffer_server.web.api.past import add_past
from experience_buffer_server.web.api.pushes import add_pushes
from experience_buffer_server.web.api.search import add_search
from experience_buffer_server.web.api.server import add_server
from experience_buffer_server.web.front import Front, names_of_this_host
from experience_buffer_server.web.openapi import document
from experience_buffer_server.web.problems import missing
from experience_buffer_server.web.route import Route, invalid
from experience_buffer_server.web.served import Served
from experience_buffer_server.web.watching import add_watching


def make_application(served: Served) -> Front:
    """Make the application. Takes a tenth of a second; any thread may do it.

    Args:
        served: What it shows.
    """
    app = FastAPI(
        title="Experience buffer",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = Route
    app.state.served = served
    app.state.kinds = []
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(RequestValidationError, invalid)
    add_watching(app)
    for add_routes in (add_server, add_buffers, add_groups, add_past, add_search, add_experiences):
        add_routes(app)
    add_events(app, served.backend.registry.metrics)
    add_pushes(app, served.backend.limits)
    _add_document(app)
    _add_pages(app, served)
    is_open = served.guard.grants is None and not served.is_secure
    names = names_of_this_host(served.backend.limits.http_names)
    count = served.backend.registry.metrics.http_answered
    return Front(app, names if is_open else None, count)


def _add_document(app: FastAPI) -> None:
    body = json_answer(document(app, app.state.kinds)).body

    async def openapi(request: Request) -> Response:
        return Response(body, media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)


def _add_pages(app: FastAPI, served: Served) -> None:
    has_page = served.backend.limits.page

    async def root(request: Request) -> Response:
        # Who only knocks learns no version.
        said = "" if served.guard.grants is not None else f"Version {__version__}."
        return pages.landing(request, has_page=has_page, said=said)

    app.add_route("/", root, include_in_schema=False)
    if not has_page:
        return
    files = pages.Pages()

    async def file(request: Request) -> Response:
        return files.answer(request, request.path_params["name"] or pages.INDEX)

    async def slash(request: Request) -> Response:
        return pages.to_page()

    app.add_route("/ui", slash, include_in_schema=False)
    app.add_route("/ui/{name:path}", file, include_in_schema=False)


async def _not_routed(request: Request, error: Exception) -> Response:
    """Where nothing is, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        methods = set((error.headers or {}).get("Allow", "").split(", "))
        # What answers a GET answers a HEAD.
        allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        said = f"{request.method} isn't possible here; what is: {allowed}."
        answer = missing(request, status=405, message=said)
        answer.headers["Allow"] = allowed
        return answer
    said = f"Nothing is at {request.url.path[:200]}; what there is stands at / and /openapi.json."
    return missing(request, status=error.status_code, message=said)
