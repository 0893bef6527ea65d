"""Sends made-up bodies to a running `jkvq serve`, and looks at every answer.

    python -m scripts.server.fuzz --port 8000 --bodies 10000

Bodies are made from the server's OpenAPI document by schemathesis: some as it has them, some not.
Every answer must be one, or an error of OpenAI's form; no failure of the server is; and in the end
it answers as it did before. Ends with 1 at the first that is not so.
"""

import argparse
import json
import os
import time
from collections import Counter
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
}
REFUSED = (400, 404, 413)
JSON = {"Content-Type": "application/json"}


class Fuzzer:
    """A server, and what came of the bodies that it was sent."""

    def __init__(self, address: str, key: str = "none"):
        headers = {"Authorization": f"Bearer {key}"}
        self.web = httpx.Client(base_url=address, headers=headers, timeout=120)
        document = self.web.get("/openapi.json").json()
        schemas = document["components"]["schemas"]
        operations = schemathesis.openapi.from_dict(document)
        self._known, self._bodies = {}, []
        for path in GOOD:
            content = document["paths"][path]["post"]["requestBody"]["content"]
            name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
            self._known[path] = set(schemas[name]["properties"]) - {"model"}
            self._bodies += [
                operations[path]["POST"]
                .as_strategy(generation_mode=mode)
                .map(lambda case: case.body)
                .map(lambda body, path=path: (path, body))
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
            ]
        self.answers: Counter[tuple[str, int]] = Counter()

    def run(self, bodies: int) -> None:
        """Sends so many; the same ones every time."""
        before = self._usual()

        @settings(
            max_examples=bodies,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        )
        @given(st.one_of(self._bodies), st.integers(0, 3))
        def one(made: tuple[str, Any], fields: int) -> None:
            self._send(*made, fields)

        one()
        assert self._usual() == before, "the server does not answer as it did before"

    def _usual(self) -> str:
        body = {"prompt": "One, two,", "max_tokens": 8, "temperature": 0}
        return self.web.post("/v1/completions", json=body).json()["choices"][0]["text"]

    def _send(self, path: str, body: Any, fields: int) -> None:
        """Sends a body, or so many of its fields in one that would be answered without them."""
        if isinstance(body, dict):
            known = [name for name in body if name in self._known[path]][-fields:]
            body = {**GOOD[path], **{name: body[name] for name in known}} if fields else body
            body = _quick(body)
        made = isinstance(body, dict | list | str | int | float | bool | None)
        content = body if isinstance(body, bytes) else json.dumps(body) if made else b""
        answer = self.web.post(path, content=content, headers=JSON)
        self.answers[path, answer.status_code] += 1
        if answer.status_code == 200:
            _require_answer(answer)
        else:
            assert answer.status_code in REFUSED, (answer.status_code, content, answer.text)
            _require_error(answer.json(), content)


def _quick(body: dict[str, Any]) -> dict[str, Any]:
    """The same body, which asks for less if it asks for much."""
    body = dict(body)
    for name, most in (("max_tokens", 3), ("max_completion_tokens", 3), ("n", 2)):
        if isinstance(body.get(name), int) and body[name] > most:
            body[name] = most
    limits = "max_tokens", "max_completion_tokens"
    if "messages" in body and all(body.get(name) is None for name in limits):
        body["max_completion_tokens"] = 2
    return body


def _require_error(found: Any, content: Any) -> None:
    assert set(found) == {"error"}, (found, content)
    assert set(found["error"]) == {"message", "type", "param", "code"}, (found, content)
    assert isinstance(found["error"]["message"], str), (found, content)


def _require_answer(answer: httpx.Response) -> None:
    if not answer.headers["Content-Type"].startswith("text/event-stream"):
        assert {"choices", "tokens"} & set(answer.json())
        return
    *events, last = answer.text.strip().split("\n\n")
    assert last == "data: [DONE]", answer.text
    assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events)


def main() -> None:
    """Sends the bodies, and says how many got which status."""
    parser = argparse.ArgumentParser(description="Sends made-up bodies to a running `jkvq serve`.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--bodies", type=int, default=10_000)
    args = parser.parse_args()
    start = time.perf_counter()
    fuzzer = Fuzzer(f"http://{args.host}:{args.port}", os.environ.get("JKVQ_API_KEY", "none"))
    try:
        fuzzer.run(args.bodies)
    finally:
        for (path, status), count in sorted(fuzzer.answers.items()):
            print(f"{path:24} {status} {count:7,}")
        print(f"{fuzzer.answers.total():,} bodies in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
