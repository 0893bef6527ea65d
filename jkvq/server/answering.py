"""What a call has written, as an answer: whole, or as server-sent events."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jkvq.engine.writer import Generation, Scores
from jkvq.openai.calls import CallReader, Said, whole_calls
from jkvq.openai.logprobs import Echo, Logprobs
from jkvq.openai.reply import Reply
from jkvq.server.asked import Asked
from jkvq.server.driver import Call, Driver, Piece
from jkvq.server.errors import ApiError, error_body

_MANY = 256  # tokens, whose log probabilities take some milliseconds
_GONE = 499  # for the log: whoever asked does not listen any more


class Answering:
    """One request on its way: what it asks for, and the call that writes it.

    echoes: with what each text begins.
    """

    def __init__(
        self, asked: Asked, reply: Reply, call: Call, driver: Driver, echoes: Sequence[Echo]
    ):
        self._asked, self._reply, self._call, self._driver = asked, reply, call, driver
        self._texts = [_Text(echo.text, CallReader() if asked.tools else None) for echo in echoes]
        tokenizer = driver.engine.llm.tokenizer
        self._logprobs = [
            Logprobs(asked.form, tokenizer, echo) for echo in echoes if asked.logprobs
        ]

    async def whole(self, request: Request) -> Response:
        """The answer when all of it is there, unless the client goes before."""
        written = asyncio.ensure_future(self._written())
        gone = asyncio.ensure_future(_disconnect(request))
        try:
            await asyncio.wait({written, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                return Response(status_code=_GONE)
            results, scores = written.result()
        finally:
            written.cancel()
            gone.cancel()
            self._driver.close(self._call)
        body = await self._json(functools.partial(self._body, results, scores), scores)
        return Response(body, media_type="application/json")

    def streamed(self) -> Response:
        """The answer in pieces, as they come."""
        return _Events(self._events(), self._driver, self._call)

    def _body(self, results: list[Generation], scores: list[Scores]) -> dict[str, Any]:
        pairs = zip(self._logprobs, scores, strict=False)  # of the former there may be none
        logprobs = [each.next(found) for each, found in pairs]
        said = [text.whole(each.text) for text, each in zip(self._texts, results, strict=True)]
        return self._reply.whole(results, self._asked.n, logprobs, said)

    async def _json(self, make: Callable[[], dict[str, Any]], scores: Sequence[Scores]) -> str:
        """A body as JSON; one of many log probabilities is made elsewhere, as others wait here."""
        if not self._asked.logprobs or sum(len(each.tokens) for each in scores) <= _MANY:
            return json.dumps(make())
        return await asyncio.to_thread(lambda: _json_in_pieces(make()))

    async def _written(self) -> tuple[list[Generation], list[Scores]]:
        found: dict[int, Generation] = {}
        scores = [Scores() for _ in range(self._call.texts)]
        async for piece in self._call.pieces():
            scores[piece.index].extend(piece.scores)
            if piece.generation is not None:
                found[piece.index] = piece.generation
        return [found[index] for index in range(self._call.texts)], scores

    async def _events(self) -> AsyncIterator[str]:
        found: dict[int, Generation] = {}
        begun: set[int] = set()
        try:
            async for piece in self._call.pieces():
                index, ended = piece.index, piece.generation
                said = self._texts[index].said(piece.text, ended=ended is not None)
                # Not: half a character, or what may become a stop string or a call
                if said.content or said.calls or self._logprobs or ended:
                    chunk = functools.partial(self._chunk, piece, said, index not in begun)
                    begun.add(index)
                    yield _event(await self._json(chunk, [piece.scores]))
                if ended is not None:
                    found[index] = ended
        except ApiError as error:  # the status has been sent: all that is left is to say so
            yield _event(json.dumps(error_body(error)))
            return
        if self._asked.usage:
            results = [found[index] for index in range(self._call.texts)]
            yield _event(json.dumps(self._reply.usage_chunk(results, self._asked.n)))
        yield "data: [DONE]\n\n"

    def _chunk(self, piece: Piece, said: Said, first: bool) -> dict[str, Any]:
        logprobs = self._logprobs[piece.index].next(piece.scores) if self._logprobs else None
        reason = piece.generation and piece.generation.finish_reason
        chunk = self._reply.chunk(piece.index, said, reason, first=first, logprobs=logprobs)
        return {**chunk, "usage": None} if self._asked.usage else chunk


class _Text:
    """What one text comes to: with its echo before it, and calls of tools taken out."""

    def __init__(self, echo: str, calls: CallReader | None):
        self._echo, self._calls = echo, calls

    def said(self, text: str, *, ended: bool) -> Said:
        """What is new with some more of it."""
        text, self._echo = self._echo + text, ""
        return Said(text) if self._calls is None else self._calls.read(text, ended=ended)

    def whole(self, text: str) -> Said:
        """All of it."""
        said = self.said(text, ended=True)
        return Said(said.content, whole_calls(said.calls), said.called)


class _Events(StreamingResponse):
    """A stream that closes its call at its end, also if it is cut off before it has begun."""

    def __init__(self, events: AsyncIterator[str], driver: Driver, call: Call):
        headers = {
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }  # at once, by proxies too
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._driver, self._call = driver, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._driver.close(self._call)


def _event(body: str) -> str:
    return f"data: {body}\n\n"


def _json_in_pieces(value: Any, depth: int = 5) -> str:
    """JSON, written token by token of log probabilities: no thread runs while one is."""
    inner = functools.partial(_json_in_pieces, depth=depth - 1)
    if depth and isinstance(value, dict):
        pairs = (f"{json.dumps(name)}: {inner(each)}" for name, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if depth and isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    return json.dumps(value)


async def _disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
