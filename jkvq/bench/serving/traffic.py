"""What is asked of a server: how long prompts and answers are, and when requests come."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jkvq.calibration.prose import default_text
from jkvq.support.arguments import INT32, number, whole
from jkvq.support.errors import UserError

_SCENARIO = re.compile(r"D\((\d{1,9}),(\d{1,9})\)")


class Scenario(NamedTuple):
    """Tokens of every prompt and of every answer; genai-bench writes it as D(256,1024)."""

    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"D({self.prompt},{self.answer})"


def parse_scenarios(text: str) -> list[Scenario]:
    """One or more of them, with commas between."""
    packed = "".join(text.split())
    found = [Scenario(*map(int, each)) for each in _SCENARIO.findall(packed)]
    if not found or ",".join(map(str, found)) != packed or min(map(min, found)) < 1:
        raise UserError(
            f"scenario={text}: tokens of the prompt and of the answer such as D(256,1024), one or "
            "more with commas between"
        )
    return found


@dataclass(frozen=True)
class Load:
    """Requests of one run; checked when it is made.

    loop: closed has ``level`` clients, each of whom sends its next request when it has its answer;
        open has ``level`` requests a second in the mean, which come when they come (Poisson).
    prefix: the share of a prompt that all requests have in common.
    requests: how many.
    seed: of what they say and when they come.
    """

    scenario: Scenario
    loop: Literal["closed", "open"]
    level: float
    prefix: float
    requests: int
    seed: int = 0

    def __post_init__(self):
        if self.loop == "closed":
            whole("concurrency", self.level, 1, 65536, "clients at once, 1 to 65536")
        else:
            number("rate", self.level, 1e-3, 1e6, "requests a second, 0.001 to 1000000")
        number("prefix", self.prefix, 0, 0.99, "the share of a prompt, 0 to 0.99")
        whole("requests", self.requests, 1, INT32, "a whole number, 1 or more")

    @property
    def clients(self) -> int:
        """That send at once, in a closed loop; in an open one nobody waits for another."""
        return int(self.level) if self.loop == "closed" else self.requests

    def arrivals(self) -> list[float]:
        """When each request comes, in seconds; in a closed loop as soon as a client is free."""
        if self.loop == "closed":
            return [0.0] * self.requests
        gaps = np.random.default_rng(self.seed).exponential(1 / self.level, self.requests)
        return np.cumsum(gaps).tolist()


class Prompts:
    """English prose as prompts, none of which begins as another does unless it is to.

    letters: of a token, by the server's own count.
    mark: what pieces begin with; who has another one has other prompts, which no server can have
        stored.
    """

    def __init__(self, letters: float, mark: str):
        self._letters, self._mark, self._text = letters, mark, default_text()

    def shared(self, load: Load, run: int) -> str:
        """What all prompts of a run begin with."""
        rng = np.random.default_rng([load.seed, run])
        return self._piece(rng, f"{self._mark}.{run}. ", load.prefix * load.scenario.prompt)

    def of(self, load: Load, run: int) -> Iterator[str]:
        """Prompts of a run without end; no other run has them."""
        rng, shared = np.random.default_rng([load.seed, run, 1]), self.shared(load, run)
        own = (1 - load.prefix) * load.scenario.prompt
        for each in itertools.count():
            yield shared + self._piece(rng, f"{self._mark}.{run}.{each}. ", own)

    def _piece(self, rng: np.random.Generator, mark: str, tokens: float) -> str:
        """About so many tokens from anywhere, after a mark that no other piece has."""
        letters, text = round(tokens * self._letters), self._text
        if not letters:
            return ""
        start = int(rng.integers(len(text)))
        turns = 1 + (start + letters) // len(text)
        return (mark + (text * turns)[start : start + letters])[:letters]
