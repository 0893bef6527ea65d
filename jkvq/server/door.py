"""What every request passes: its key, the size of its body, and a line in the log, without text."""

import hmac
import json
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jkvq.server.errors import ApiError, error_response
from jkvq.server.page import PATHS

LOG = logging.getLogger("jkvq.server.requests")
MOST_BYTES = 4 << 20  # of a body; a million tokens of English text
_HEALTH = "/health"
_OPEN = {_HEALTH, *PATHS}  # those that need no key
_UNLOGGED = (_HEALTH, "/ready", "/metrics")  # asked all the time


class Door:
    """Lets those in who have the key, with bodies of a size that can be dealt with."""

    def __init__(self, app: ASGIApp, key: str | None):
        self._app = app
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, read = time.perf_counter(), 500, 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MOST_BYTES:
                raise ApiError(413, f"the body has more than {MOST_BYTES:,} bytes: shorten it")
            return message

        try:
            if self._knows(scope):
                await self._app(scope, counted, noted)
            else:
                await _refusal(scope)(scope, receive, noted)
        finally:
            if scope["path"] not in _UNLOGGED:
                _log(scope, status, time.perf_counter() - start)

    def _knows(self, scope: Scope) -> bool:
        if self._wanted is None or scope["path"] in _OPEN:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._wanted)  # in the same time, however much is right


def _refusal(scope: Scope):
    has = any(name == b"authorization" for name, _ in scope["headers"])
    message = "the API key is not this server's" if has else "no API key was sent"
    return error_response(
        ApiError(
            401,
            f"{message}: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    )


def _log(scope: Scope, status: int, seconds: float) -> None:
    """A line of JSON; a path that is none of ours may hold anything, and is left out."""
    path = getattr(scope.get("route"), "path", None)
    line = {"method": scope["method"], "path": path, "status": status}
    LOG.info(json.dumps({**line, "seconds": round(seconds, 4)}))
