"""A server over a tiny random model, in a thread of this process, with OpenAI's own client."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

import jkvq
from jkvq.server.server import Server, bind
from tests.tiny import byte_tokenizer, tiny_llm

TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"


class Running:
    """A server that runs, and ways to talk to it."""

    def __init__(self, server: Server, address: str, llm: jkvq.LLM):
        self.server, self.address, self.llm = server, address, llm
        self.http = httpx.Client(base_url=address, timeout=60)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=60)

    def figure(self, name: str) -> float:
        """A line of /metrics."""
        lines = self.http.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def wait_until(self, name: str, value: float) -> None:
        """Until a line of /metrics says so."""
        end = time.monotonic() + 20
        while self.figure(name) != value:
            assert time.monotonic() < end, f"{name} is {self.figure(name)}, never {value}"
            time.sleep(0.01)


@contextmanager
def running(llm: jkvq.LLM, **options: Any) -> Iterator[Running]:
    place = bind("127.0.0.1", 0)
    server = Server(llm, place, name="tiny", **{"slots": 4, **options})
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Running(server, f"http://127.0.0.1:{place.getsockname()[1]}", llm)
    finally:
        server.end()
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def chatty() -> jkvq.LLM:
    """A tiny model with a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = TEMPLATE
    return dataclasses.replace(tiny_llm(), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def served(chatty) -> Iterator[Running]:
    with running(chatty) as found:
        yield found


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return served.client()
