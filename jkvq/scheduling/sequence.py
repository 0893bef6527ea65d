"""One request as the scheduler sees it: numbers of tokens, and pages."""

import hashlib
from collections.abc import Sequence as Listed
from typing import Literal

import numpy as np

from jkvq.scheduling.window import Held

State = Literal["waiting", "prefill", "decode", "ended"]


class Sequence:
    """A prompt and the tokens drawn after it.

    A sequence that is preempted begins again: its ``run`` is another one then, and what was drawn
    before is drawn again, as it was. One whose prompt is ``scored`` reads nothing that is stored:
    all of its prompt is run.
    """

    def __init__(self, number: int, prompt: Listed[int], budget: int, *, scored: bool = False):
        self.number = number  # of its arrival: the smaller, the older
        self.prompt = prompt
        self.budget = budget  # tokens to draw at most
        self.longest = len(prompt) + budget - 1  # tokens stored in the end: the last never is
        self.scored = scored
        self.state: State = "waiting"
        self.run = 0
        self.slot = -1
        self.cached = 0  # prompt tokens that came from the prefix cache, in the latest run
        self.chunks: list[bytes] = []  # names of the prompt's full chunks, each with all before it
        self._begin()

    def _begin(self) -> None:
        self.stored = 0  # tokens of the prompt that are stored when all that is launched has run
        self.read = 0  # tokens drawn in this run, as far as the host has read
        self.launched = 0  # the same when all that is launched has run, at most
        self.granted = 0  # tokens that there are pages for
        self.packed: list[int] = []  # its pages in the pool of packed ones, in their order
        self.held: list[Held] = []  # those in the pools of windows
        self.drops_at = 0  # tokens stored when one of those is next let go of

    def restart(self) -> None:
        """Back to where nothing is stored."""
        self.run += 1
        self.state, self.slot = "waiting", -1
        self._begin()

    @property
    def least(self) -> int:
        """Tokens that are stored for certain."""
        if self.state != "decode":
            return self.stored
        return len(self.prompt) + max(self.read - 1, 0)


def chunk_names(prompt: Listed[int], chunk: int) -> list[bytes]:
    """A name for every full chunk of a prompt, which stands for it and all before it."""
    tokens, names, name = np.asarray(prompt, np.int32), [], b""
    for end in range(chunk, len(prompt) + 1, chunk):
        name = hashlib.blake2b(name + tokens[end - chunk : end].tobytes(), digest_size=16).digest()
        names.append(name)
    return names
