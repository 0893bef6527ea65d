"""Any number of requests through an engine, a window of them at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jkvq.engine.capacity import serving_limits
from jkvq.engine.engine import Engine, require_llm
from jkvq.engine.options import Options
from jkvq.engine.prompt import encode_prompt, strangers_prompt
from jkvq.engine.writer import Generation, Handle
from jkvq.jobs.requests import Request, read_request
from jkvq.llm import LLM
from jkvq.support.arguments import shown
from jkvq.support.errors import UserError

_WINDOW = 2  # requests in the engine, in its slots: whoever ends is followed at once
_AT_ONCE = 16  # requests that are read between two ticks, while the device is at work


@dataclass(frozen=True)
class Answer:
    """What came of one request.

    index: which request, from 0.
    custom_id: as the request calls itself.
    generation: None if the request was refused.
    error: why there is no text, or not all of it; other requests go on.
    """

    index: int
    custom_id: str | int | None
    generation: Generation | None
    error: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request of a job: of which one, if there are several, and its index there."""

    job: int
    index: int
    request: Request


def batch(
    llm: LLM,
    requests: Iterable[Any],
    *,
    max_new_tokens: int = 256,
    seed: int = 0,
    memory: float = 0.9,
    slots: int | None = None,
) -> Iterator[Answer]:
    """Answers requests as they end, not in their order; takes them only as it needs them.

    Args:
        llm: from `jkvq.load`.
        requests: prompts, or dicts as `jkvq batch` reads them: {"prompt": ...} or
            {"messages": [...]} with fields of `jkvq.Options` and a "custom_id", or OpenAI's batch
            lines. One that is refused gets an answer with an ``error``.
        max_new_tokens: of requests that do not say.
        seed: requests that draw and name no seed get one made of it and of their place.
        memory, slots: see `jkvq.Engine`.
    """
    defaults = Options(max_new_tokens=max_new_tokens, seed=seed)
    if not isinstance(requests, Iterable) or isinstance(requests, str | bytes | dict):
        raise UserError(f"{shown(requests)} is no list of requests: put a single one in brackets")
    window = Window(llm, memory, slots)
    read = (Asked(0, i, read_request(r, i + 1, defaults)) for i, r in enumerate(requests))
    return (answer for _, answer in window.answers(read))


class Window:
    """An engine that has only some of all requests at once."""

    def __init__(self, llm: LLM, memory: float = 0.9, slots: int | None = None):
        require_llm(llm)
        limits = serving_limits(llm, memory, slots)
        self._llm, self._engine = llm, Engine.of(llm, limits)
        self._size = _WINDOW * limits.slots

    def answers(self, requests: Iterator[Asked]) -> Iterator[tuple[Asked, Answer]]:
        """Each request and its answer, when it has ended.

        Args:
            requests: the next one is taken when there is room for it.
        """
        going: dict[int, Asked] = {}
        for number, asked in enumerate(requests, 1):
            try:
                going[self._submit(asked.index, asked.request).number] = asked
            except UserError as error:
                yield asked, Answer(asked.index, asked.request.custom_id, None, str(error))
            if len(going) >= self._engine.slots and number % _AT_ONCE == 0:
                yield from self._ended(going)
            while len(going) >= self._size:
                yield from self._ended(going)
        while going:
            yield from self._ended(going)

    def _submit(self, index: int, request: Request) -> Handle:
        if request.prompt is None:
            raise UserError(request.error)
        with strangers_prompt():
            tokens = encode_prompt(
                self._llm, request.prompt, request.options.chat, request.options.answer_start
            )
        return self._engine.submit_tokens(tokens, request.options, f"line {index + 1}")

    def _ended(self, going: dict[int, Asked]) -> Iterator[tuple[Asked, Answer]]:
        """Runs the engine for a tick and takes out the requests that it has ended."""
        for handle in self._engine.step():
            if handle.done and handle.number in going:
                asked, written = going.pop(handle.number), handle.result()
                named = asked.index, asked.request.custom_id
                yield asked, Answer(*named, written, written.error)
