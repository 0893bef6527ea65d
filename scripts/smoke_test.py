"""Asks a running `jkvq serve` for a bit of everything, and says what it got.

    python -m scripts.smoke_test --port 8000

Ends with 1 if something was not as it should be.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai

HELLO = [{"role": "user", "content": "Name three birds."}]


class Session:
    """A client of one server, and the model that it serves."""

    def __init__(self, root: str, key: str):
        self.client = openai.OpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0)
        self.web = httpx.Client(base_url=root, headers={"Authorization": f"Bearer {key}"})
        self.model = self.client.models.list().data[0].id

    def chat(self, **changes):
        """One answer to a short conversation."""
        asked = {"model": self.model, "messages": HELLO, "max_tokens": 16, "seed": 1, **changes}
        return self.client.chat.completions.create(**asked)

    def text(self, **changes) -> str:
        return self.chat(**changes).choices[0].message.content


def is_up(session: Session) -> str:
    """It is up, and takes requests."""
    assert [session.web.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
    return f"serves {session.model}"


def chats(session: Session) -> str:
    """A chat, whose usage adds up."""
    answer = session.chat()
    usage = answer.usage
    assert answer.choices[0].message.content
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return f"{usage.completion_tokens} tokens: {answer.choices[0].message.content[:40]!r}"


def repeats(session: Session) -> str:
    """The same seed gives the same text, in pieces too."""
    chosen = {"temperature": 0.8}
    whole = session.text(**chosen)
    assert session.text(**chosen) == whole
    chunks = list(session.chat(**chosen, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole
    assert chunks[-1].usage is not None
    return f"{len(pieces)} pieces"


def completes(session: Session) -> str:
    """A completion with log-probabilities, which ends where it is told to."""
    asked = {"model": session.model, "prompt": "One, two, three,", "max_tokens": 12}
    answer = session.client.completions.create(**asked, temperature=0, logprobs=0)
    found = answer.choices[0]
    assert len(found.logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(number <= 0 for number in found.logprobs.token_logprobs)
    stop = found.text[len(found.text) // 2]
    cut = session.client.completions.create(**asked, temperature=0, stop=stop).choices[0]
    assert cut.finish_reason == "stop" and cut.text == found.text.split(stop)[0]
    return repr(found.text)


def refuses(session: Session) -> str:
    """What it cannot do is refused in OpenAI's form."""
    sentences = []
    for changes, status in (({"n": 0}, 400), ({"top_logprobs": 5}, 400), ({"model": "x"}, 404)):
        try:
            session.chat(**changes)
        except openai.APIStatusError as error:
            assert error.status_code == status, error
            sentences.append(error.response.json()["error"]["message"])
        else:
            raise AssertionError(f"{changes} was not refused")
    return sentences[0]


def at_once(session: Session) -> str:
    """Sixteen at once write what one alone writes."""
    alone = session.text(temperature=0)
    start = time.perf_counter()
    with ThreadPoolExecutor(16) as clients:
        texts = list(clients.map(lambda _: session.text(temperature=0), range(16)))
    assert set(texts) == {alone}
    return f"{time.perf_counter() - start:.1f} s"


def counts(session: Session) -> str:
    """Tokens are counted, by the tokenizer and for Prometheus."""
    found = session.web.post("/tokenize", json={"prompt": "three birds"}).json()
    assert found["count"] == len(found["tokens"]) > 0
    lines = session.web.get("/metrics").text.splitlines()
    drawn = next(line for line in lines if line.startswith("jkvq_drawn_tokens_total"))
    assert float(drawn.split()[-1]) > 0
    return drawn


CHECKS: list[Callable[[Session], str]] = [
    *(is_up, chats, repeats, completes, refuses, at_once, counts),
]


def main() -> None:
    """Runs every check, and says which of them failed."""
    parser = argparse.ArgumentParser(description="Asks a running `jkvq serve` for everything.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    root = f"http://{args.host}:{args.port}"
    try:
        session = Session(root, os.environ.get("JKVQ_API_KEY", "none"))
    except openai.OpenAIError as error:
        sys.exit(f"{root} does not answer as a server does: {error}")
    failed = 0
    for check in CHECKS:
        try:
            print(f"ok      {check.__doc__} {check(session)}", flush=True)
        except Exception as error:  # whatever it is, the others run
            failed += 1
            print(f"FAILED  {check.__doc__} {type(error).__name__}: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
