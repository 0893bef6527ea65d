"""What a call has written, as an answer: whole, or as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from jkvq.engine.writer import Generation, Scores
from jkvq.models.tokenizer import Tokenizer
from jkvq.openai.calls import CallReader, Said, whole_calls
from jkvq.openai.logprobs import Logprobs
from jkvq.openai.reply import Reply
from jkvq.server.asked import Asked
from jkvq.server.driver import Call, Driver
from jkvq.server.errors import ApiError, error_body

_GONE = 499  # for the log: whoever asked does not listen any more


class Answering:
    """One request on its way: what it asks for, and the call that writes it.

    echoes: with what each text begins.
    """

    def __init__(
        self, asked: Asked, reply: Reply, call: Call, driver: Driver, echoes: Sequence[str]
    ):
        self._asked, self._reply, self._call, self._driver = asked, reply, call, driver
        self._texts = [_Text(echo, CallReader() if asked.tools else None) for echo in echoes]

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
        logprobs = (
            [self._logprobs().next(each) for each in scores] if self._asked.logprobs else None
        )
        said = [text.whole(each.text) for text, each in zip(self._texts, results, strict=True)]
        return JSONResponse(self._reply.whole(results, self._asked.n, logprobs, said))

    def streamed(self) -> Response:
        """The answer in pieces, as they come."""
        return _Events(self._events(), self._driver, self._call)

    async def _written(self) -> tuple[list[Generation], list[Scores]]:
        found: dict[int, Generation] = {}
        scores = [Scores() for _ in range(self._call.texts)]
        async for piece in self._call.pieces():
            scores[piece.index].extend(piece.scores)
            if piece.generation is not None:
                found[piece.index] = piece.generation
        return [found[index] for index in range(self._call.texts)], scores

    async def _events(self) -> AsyncIterator[str]:
        logprobs = [self._logprobs() for _ in range(self._call.texts) if self._asked.logprobs]
        found: dict[int, Generation] = {}
        begun: set[int] = set()
        usage = {"usage": None} if self._asked.usage else {}
        try:
            async for piece in self._call.pieces():
                index, ended = piece.index, piece.generation
                new = logprobs[index].next(piece.scores) if logprobs else None
                text = self._texts[index]
                said = text.said(piece.text, ended=ended is not None)
                # Not: half a character, or what may become a stop string or a call
                if said.content or said.calls or new or ended:
                    reason, how = ended and ended.finish_reason, {"called": text.called}
                    how |= {"first": index not in begun}
                    chunk = self._reply.chunk(index, said, reason, logprobs=new, **how)
                    begun.add(index)
                    yield _event({**chunk, **usage})
                if ended is not None:
                    found[index] = ended
        except ApiError as error:  # the status has been sent: all that is left is to say so
            yield _event(error_body(error))
            return
        if self._asked.usage:
            results = [found[index] for index in range(self._call.texts)]
            yield _event(self._reply.usage_chunk(results, self._asked.n))
        yield "data: [DONE]\n\n"

    def _logprobs(self) -> Logprobs:
        return Logprobs(self._asked.form, self._tokenizer)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._driver.engine.llm.tokenizer


class _Text:
    """What one text comes to: with its echo before it, and calls of tools taken out."""

    def __init__(self, echo: str, calls: CallReader | None):
        self._echo, self._calls = echo, calls

    @property
    def called(self) -> bool:
        """Whether it has called a tool."""
        return self._calls is not None and self._calls.calls > 0

    def said(self, text: str, *, ended: bool) -> Said:
        """What is new with some more of it."""
        text, self._echo = self._echo + text, ""
        return Said(text) if self._calls is None else self._calls.read(text, ended=ended)

    def whole(self, text: str) -> Said:
        """All of it."""
        said = self.said(text, ended=True)
        return Said(said.content, whole_calls(said.calls))


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


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
