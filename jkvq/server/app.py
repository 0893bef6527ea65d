"""The endpoints."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from jkvq.engine.prompt import as_batch, prompt_tokens, strangers_prompt
from jkvq.openai.body import URLS, Form
from jkvq.openai.messages import read_messages
from jkvq.openai.reply import Reply
from jkvq.server.answering import Answering
from jkvq.server.asked import read_asked
from jkvq.server.bodies import ChatBody, CompletionBody, TokenizeBody, as_sent
from jkvq.server.door import Door
from jkvq.server.driver import Driver
from jkvq.server.errors import ApiError, add_handlers
from jkvq.server.metrics import Metrics
from jkvq.server.page import add_page
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError
from jkvq.version import VERSION


class Service:
    """What the endpoints do, with one model.

    name: of the model, as clients call it.
    """

    def __init__(self, driver: Driver, metrics: Metrics, name: str):
        self.driver, self.metrics, self.name = driver, metrics, name
        self._llm, self._started = driver.engine.llm, int(time.time())
        # One thread, so that requests reach the engine in their order, and no prompt stops a tick
        self._reader = ThreadPoolExecutor(1, "jkvq-tokenizer")

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """While the server does."""
        self.driver.start()
        yield
        await self.driver.stop()
        self._reader.shutdown()

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.model(self.name)]}

    def model(self, name: str | None) -> dict[str, Any]:
        """The model of this name; None is the only one."""
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"there is no model {shown(name)} here: ask for {shown(self.name)}",
                param="model",
                code="model_not_found",
            )
        return {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "jkvq",
            "max_model_len": self._llm.config.context,
        }

    async def answer(
        self, form: Form, body: ChatBody | CompletionBody, request: Request
    ) -> Response:
        self.model(body.model)
        if form == "chat":
            self._require_chat()
        asked = read_asked(form, body)
        call = self.driver.open(asked.texts)
        try:
            prompts = await self._read(lambda: asked.encoded(self.driver.engine))
            echoes = await self._read(lambda: asked.echoes(prompts, self._llm.tokenizer))
            self.driver.submit(call, prompts, watched=asked.stream)
        except BaseException:
            self.driver.close(call)
            raise
        reply = Reply(form, uuid.uuid4().hex, self.name)
        answering = Answering(asked, reply, call, self.driver, echoes)
        return answering.streamed() if asked.stream else await answering.whole(request)

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        self.model(body.model)
        given = as_sent(body)
        if (body.prompt is None) == (body.messages is None):
            both = "no prompt and no messages" if body.prompt is None else "prompt and messages"
            raise UserError(f"the body has {both}: give one of them")
        if body.messages is not None:
            self._require_chat()
        prompt = body.prompt if body.messages is None else read_messages(given["messages"])
        (checked,), _ = as_batch(prompt)
        with strangers_prompt():
            tokens = await self._read(lambda: prompt_tokens(self._llm, checked, chat=False))
        context = self._llm.config.context
        return {"tokens": tokens, "count": len(tokens), "max_model_len": context}

    def ready(self) -> Response:
        """Whether requests are taken."""
        if self.driver.failure is not None or self.driver.draining:
            raise ApiError(503, "the server is ending", code="unavailable")
        return JSONResponse({"status": "ready"})

    def health(self) -> Response:
        if self.driver.failure is not None:
            raise ApiError(503, "the engine has failed", code="unavailable")
        return JSONResponse({"status": "ok"})

    def figures(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _require_chat(self) -> None:
        if not self._llm.tokenizer.can_chat:
            raise UserError(
                f"{self.name} has no chat template: send its text to {URLS['completion']}"
            )

    async def _read(self, encode) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, encode)


def make_app(service: Service, key: str | None) -> FastAPI:
    """The app of a service; with a key, for those who have it."""
    # Pages that show the document fetch scripts from elsewhere: only the document is here.
    app = FastAPI(
        title="jkvq", version=VERSION, lifespan=service.running, docs_url=None, redoc_url=None
    )
    add_handlers(app)
    app.add_middleware(Door, key=key)
    add_page(app)

    @app.post(URLS["chat"])
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await service.answer("chat", body, request)

    @app.post(URLS["completion"])
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await service.answer("completion", body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return service.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.model(name)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        return await service.tokenize(body)

    @app.get("/health")
    async def health() -> Response:
        return service.health()

    @app.get("/ready")
    async def ready() -> Response:
        return service.ready()

    @app.get("/metrics")
    async def metrics() -> Response:
        return service.figures()

    return app
