"""A server of OpenAI's interface that takes the time it is told to, whatever it is asked."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

LETTERS = 4  # of a token, but for what a prompt has besides


class Scripted:
    """Answers with ``tokens`` tokens: the first after ``first`` seconds, others ``next`` apart."""

    def __init__(self, first: float, between: float, **options: Any):
        self.first, self.between = first, between
        self.most: int = options.get("most", 1 << 30)  # tokens of an answer
        self.refused: tuple[str, ...] = options.get("refused", ())  # fields
        self.fails: int = options.get("fails", 0)  # so many requests, after the first two
        self.usage: bool = options.get("usage", True)
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if unknown := [name for name in self.refused if name in body]:
            error = {"error": {"message": f"{unknown[0]} is not known"}}
            return web.json_response(error, status=400)
        self.bodies.append(body)
        if self.fails and len(self.bodies) > 4:
            self.fails -= 1
            return web.Response(status=502, text="bad gateway")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        count = min(body["max_tokens"], self.most)
        await send(answer, {"choices": [{"text": "", "finish_reason": None}]})  # no token yet
        for token in range(count):
            await asyncio.sleep(self.first if token == 0 else self.between)
            await send(answer, {"choices": [{"text": "x", "finish_reason": None}]})
        tokens = {"prompt_tokens": len(body["prompt"]) // LETTERS, "completion_tokens": count}
        if self.usage:
            await send(answer, {"choices": [], "usage": tokens})
        await answer.write(b"data: [DONE]\n\n")
        self.running -= 1
        return answer


async def send(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(f"data: {json.dumps(event)}\n\n".encode())


@contextmanager
def scripted(server: Scripted) -> Iterator[str]:
    """Its address."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    app = web.Application()
    app.add_routes([web.get("/v1/models", server.models)])
    app.add_routes([web.post("/v1/completions", server.complete)])
    runner = web.AppRunner(app)
    port = 0

    async def start() -> None:
        nonlocal port
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        started.set()

    loop.create_task(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
