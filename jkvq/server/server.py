"""A server from its socket to its end."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import sys

import uvicorn

from jkvq.cache.specs.spec_text import spec_text
from jkvq.engine.capacity import serving_limits
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.llm import LLM
from jkvq.server.app import Service, make_app
from jkvq.server.driver import Driver
from jkvq.server.guard import Guard, Guarded
from jkvq.server.metrics import Metrics
from jkvq.support.arguments import whole
from jkvq.support.errors import UserError
from jkvq.version import VERSION

_LAST_WORDS = 5  # seconds for answers to be sent, once all texts have ended
# Seconds that a connection may be idle: longer than clients and proxies keep theirs, or one that
# the server closes is used once more by whoever does not know yet, and that request is lost.
_IDLE = 75


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address that nobody else has; it listens when a server has it."""
    whole("port", port, 0, 65535, "0 (any that is free) to 65535")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(family, kind)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except OSError as error:
        raise UserError(
            f"{host}, port {port}, cannot be served: {error.strerror}; give another --port or "
            "--host"
        ) from None
    return place


class Server:
    """Serves a model at a socket.

    Args:
        llm: from `jkvq.load`.
        place: from `bind`.
        name: of the model, as clients call it.
        memory, slots: see `jkvq.Engine`.
        max_queue: texts that may wait for a slot.
        drain: seconds that requests have to end once the server is to.
        key: that clients must send; None asks for none.
        guarded: how texts are looked at again; None does not.
    """

    def __init__(
        self,
        llm: LLM,
        place: socket.socket,
        *,
        name: str,
        memory: float = 0.9,
        slots: int | None = None,
        max_queue: int = 256,
        drain: float = 30.0,
        key: str | None = None,
        guarded: Guarded | None = None,
    ):
        metrics = Metrics()
        # Before the pools, which take what is left of the memory
        self._guard = None if guarded is None else Guard(llm, guarded, metrics.guard())
        self._limits = serving_limits(llm, memory, slots)
        engine = Engine.of(llm, self._limits)
        self.driver = Driver(
            *(engine, engine.slots + max_queue, metrics), on_failure=self._stop, guard=self._guard
        )
        metrics.about(model=name, cache=spec_text(llm.spec), version=VERSION)
        metrics.watch(lambda: self.driver.stats)
        app = make_app(Service(self.driver, metrics, name), key)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            server_header=False,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        self._uvicorn, self._place, self._drain = uvicorn.Server(config), place, drain

    @property
    def started(self) -> bool:
        return self._uvicorn.started

    def warm_up(self) -> None:
        """Compiles what most requests run, so that the first of them do not wait for it."""
        engine, options = self.driver.engine, Options(max_new_tokens=2, ignore_eos=True, seed=0)
        short, *longer = self._limits.chunks
        for width, temperature in ((short, 0.0), (short, 1.0), *((each, 1.0) for each in longer)):
            # A token less than a chunk: full ones are kept for others.
            with contextlib.suppress(UserError):  # what does not fit will not be asked for
                tokens = [0] * min(width - 1, engine.llm.config.context - 1)
                chosen = dataclasses.replace(options, temperature=temperature)
                engine.submit_tokens(tokens, chosen).result()
        if self._guard is not None:
            self._guard.warm_up()

    def run(self) -> None:
        """Serves until `end` is called, or the engine fails, which is raised."""
        self._uvicorn.run(sockets=[self._place])
        if self.driver.failure is not None:
            raise self.driver.failure

    def end(self) -> None:
        """Lets requests end that there are, refuses others, and ends; from any thread."""
        if self.started:
            asyncio.run_coroutine_threadsafe(self._end(), self.driver.loop)
        else:  # it ends before it has begun
            self._stop()

    async def _end(self) -> None:
        await self.driver.drain(self._drain)
        self._stop()

    def _stop(self) -> None:
        self._uvicorn.should_exit = True


def log_to_stderr() -> None:
    """Lets the server's lines be seen: those of requests as JSON, others as they are."""
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("jkvq.server")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
