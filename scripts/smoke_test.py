"""Asks a running `jkvq serve` for a bit of everything, and says what it got.

    python -m scripts.smoke_test --port 8000

Ends with 1 if something was not as it should be.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai

HELLO = [{"role": "user", "content": "Name three birds."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "bird": {"enum": ["robin", "crow", "wren"]},
        "wings": {"type": "integer", "minimum": 0, "maximum": 4},
    },
    "required": ["bird", "wings"],
    "additionalProperties": False,
}


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


def formats(session: Session) -> str:
    """An answer follows its schema."""
    described = {"type": "json_schema", "json_schema": {"name": "bird", "schema": SCHEMA}}
    answer = session.chat(response_format=described, max_tokens=100).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"
    return answer.message.content


def calls(session: Session) -> str:
    """A tool is called, and what came of it can be told, in pieces too."""
    tools = [{"type": "function", "function": {"name": "note_bird", "parameters": SCHEMA}}]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    message = session.chat(**asked, max_tokens=100).choices[0].message
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    pieces = [
        piece.function.arguments
        for chunk in session.chat(**asked, max_tokens=100, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(pieces) == call.function.arguments
    told = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
    assert session.chat(messages=told, tools=tools, tool_choice="none").choices[0].message.content
    return f"{call.function.name}({call.function.arguments}) in {len(pieces)} pieces"


def echoes(session: Session) -> str:
    """A prompt comes back with its log probabilities, and with the likeliest tokens."""
    tokens = session.web.post("/tokenize", json={"prompt": "One, two, three,"}).json()["tokens"]
    asked = {"model": session.model, "prompt": tokens, "max_tokens": 0, "logprobs": 2}
    found = session.client.completions.create(**asked, echo=True).choices[0]
    numbers = found.logprobs.token_logprobs
    assert found.text == "One, two, three," and len(numbers) == len(tokens)
    assert numbers[0] is None and all(number <= 0 for number in numbers[1:])
    tops = [max(top.values()) for top in found.logprobs.top_logprobs[1:]]
    assert all(top >= number for top, number in zip(tops, numbers[1:], strict=True))
    return f"{len(numbers)} tokens"


def changes_scores(session: Session) -> str:
    """Penalties and biases change what is drawn."""
    plain, chosen = session.text(temperature=0), {"temperature": 0, "logprobs": True}
    assert session.text(**chosen, frequency_penalty=2.0, presence_penalty=2.0) != plain
    token = session.web.post("/tokenize", json={"prompt": "bird"}).json()["tokens"][0]
    biased = session.text(**chosen, logit_bias={str(token): 100}, max_tokens=3)
    assert len(set(biased.split())) <= 1
    return repr(biased)


def at_once(session: Session) -> str:
    """Sixty-four at once write what one alone writes."""
    alone = session.text(temperature=0)
    start = time.perf_counter()
    with ThreadPoolExecutor(64) as clients:
        texts = list(clients.map(lambda _: session.text(temperature=0), range(64)))
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
    *(is_up, chats, repeats, completes, formats, calls, echoes, changes_scores),
    *(refuses, at_once, counts),
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
