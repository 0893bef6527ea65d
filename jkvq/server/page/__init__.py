"""A page to chat with the model and to watch the server; its files are sent as they are."""

from importlib.resources import files

from fastapi import FastAPI, Response

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_FILES = {
    "/": "index.html",
    **{f"/{name}": name for name in ("page.css", "page.js", "chat.js", "watch.js")},
}
PATHS = frozenset(_FILES)  # they say nothing of the model: the key is for what they ask for
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Lets an app have the page."""
    for path, name in _FILES.items():
        _add(app, path, name)


def _add(app: FastAPI, path: str, name: str) -> None:
    content = files(__name__).joinpath(name).read_bytes()
    kind = f"{_KINDS[name.rpartition('.')[2]]}; charset=utf-8"

    @app.get(path, include_in_schema=False)
    async def send() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)
