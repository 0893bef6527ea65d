"""A client of OpenAI's interface that knows when every token came."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from jkvq.support.errors import UserError

_HOURS = aiohttp.ClientTimeout(total=None, connect=60)


@dataclass(frozen=True)
class Timed:
    """A request and when things happened to it, in seconds on one clock.

    first: when the first of its text came.
    tokens: of the answer, as the server counts them; so are the prompt's and those of them that it
        had stored, None where it does not say.
    error: why there is no answer.
    """

    submitted: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        """The time to the first token."""
        return self.first - self.submitted

    @property
    def e2e(self) -> float:
        """The time to the end."""
        return self.ended - self.submitted


class _Refused(Exception):
    """A server's answer that is an error."""


class Client:
    """Asks one server for completions; made by `connected`."""

    def __init__(self, session: aiohttp.ClientSession, url: str):
        self._session, self._url = session, url
        self._fixed: dict[str, Any] = {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }

    @property
    def ignores_eos(self) -> bool:
        """Whether every answer has as many tokens as were asked for."""
        return "ignore_eos" in self._fixed

    async def prepare(self, model: str | None) -> None:
        """Finds out what the server serves and whether it can go on past the end of a text."""
        if model is None:
            try:
                async with self._session.get(f"{self._url}/models") as answer:
                    model = (await _checked(answer))["data"][0]["id"]
            except (aiohttp.ClientError, OSError, LookupError, TypeError, _Refused) as error:
                raise UserError(f"{self._url}/models names no model: {error}") from None
        self._fixed["model"] = model
        tried = await self.ask("Hello", 1)
        if tried.error is not None:
            del self._fixed["ignore_eos"]
            tried = await self.ask("Hello", 1)
        if tried.error is not None:
            raise UserError(f"{self._url}/completions does not answer: {tried.error}")
        if not tried.tokens:
            raise UserError(
                f"{self._url}/completions counts no tokens when it streams, and without usage "
                "nothing can be measured: give a server that has stream_options.include_usage"
            )

    async def ask(self, prompt: str, tokens: int) -> Timed:
        """Sends a request, and reads its answer to the end."""
        submitted = time.perf_counter()
        body = {**self._fixed, "prompt": prompt, "max_tokens": tokens}
        first = None
        usage: dict[str, Any] = {}
        try:
            async with self._session.post(f"{self._url}/completions", json=body) as answer:
                async for event in _events(answer):
                    if "error" in event:
                        raise _Refused(_sentence(event))
                    if first is None and any(map(_has_token, event.get("choices", ()))):
                        first = time.perf_counter()
                    usage = event.get("usage") or usage
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, _Refused) as error:
            return Timed(submitted, error=str(error) or type(error).__name__)
        ended = time.perf_counter()
        if first is None:
            return Timed(submitted, error="the stream ended without a token")
        return Timed(
            submitted,
            first,
            ended,
            usage.get("completion_tokens", 0),
            usage.get("prompt_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )


@asynccontextmanager
async def connected(url: str, model: str | None, key: str | None) -> AsyncIterator[Client]:
    """A client of the server at ``url``, with any number of connections at once."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    many = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=many, timeout=_HOURS, headers=headers) as session:
        root = url.rstrip("/")
        client = Client(session, root if root.endswith("/v1") else f"{root}/v1")
        await client.prepare(model)
        yield client


def _has_token(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("finish_reason"))


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """What a stream says, until it is done."""
    if answer.status != 200:
        await _checked(answer)
    async for line in answer.content:
        data = line.strip()
        if data == b"data: [DONE]":
            return
        if data.startswith(b"data:"):
            yield json.loads(data[5:])


async def _checked(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON of an answer that is no error."""
    text = await answer.text()
    try:
        body = json.loads(text)
    except ValueError:
        body = {"error": text[:200]}
    if answer.status != 200:
        raise _Refused(f"{answer.status}: {_sentence(body)}")
    return body


def _sentence(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
