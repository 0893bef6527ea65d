"""Runs loads against a server, and says how long its requests took.

Tokens per second are those of SAW-INT4's appendix D (arXiv 2604.19157), of requests that had an
answer:

    of the system   sum of the answers' tokens / wall-clock time of the run             (17)
    per request     mean of a request's tokens / (its time to the end - to the first token)  (18)
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jkvq.bench.serving.client import Client, Timed, connected
from jkvq.bench.serving.traffic import Load, Prompts, Scenario
from jkvq.support.errors import UserError

_FIRST_LETTERS = 200  # that are sent to see how many letters a token has
_WARM_TOKENS = 8  # of answers that are not measured
_WARM_CLIENTS = 8  # of an open loop


class Quantiles(NamedTuple):
    """Seconds: the mean of requests, and what so many in a hundred of them took at most."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Measured:
    """What one load has taken.

    server: its cache, or where it is.
    failed: requests without an answer, and ``error``, why the first of them has none; the other
        figures leave them out.
    seconds: from the first request to the end of the last.
    prompt_tokens: of a request, in the mean; cached_share: of these, those that the server had
        stored, None if it does not say.
    tokens: of all answers, and whole_answers: all of them have as many as were asked for.
    ttft: the time to the first token; tpot: from a token to the next, in the mean of a request;
        e2e: to the end. None where no request has two tokens.
    request_rate, system_rate: tokens per second, see above.
    """

    server: str
    load: Load
    failed: int
    error: str | None
    seconds: float
    prompt_tokens: float
    cached_share: float | None
    tokens: int
    whole_answers: bool
    ttft: Quantiles
    tpot: Quantiles | None
    e2e: Quantiles
    request_rate: float | None
    system_rate: float


async def bench_server(
    server: str,
    loads: Sequence[Load],
    *,
    url: str,
    model: str | None,
    key: str | None,
    advance: Callable[[int], None],
) -> AsyncIterator[Measured]:
    """Runs the loads one after the other.

    Before the clock starts a whole request of each scenario has run, and as many short ones at once
    as the load has clients.

    Args:
        server: what it is called.
        loads: what to run.
        url: where OpenAI's interface is.
        model: None is the first that the server names.
        key: that it wants, if any.
        advance: called with the number of requests that have ended.
    """
    prompts: dict[Scenario, Prompts] = {}
    async with connected(url, model, key) as client:
        for run, load in enumerate(loads):
            if load.scenario not in prompts:
                prompts[load.scenario] = await _sized(client, load.scenario)
            yield await _measure(server, client, prompts[load.scenario], load, run, advance)


async def _sized(client: Client, scenario: Scenario) -> Prompts:
    """Prompts of the length of a scenario by the server's count, after trying one of them."""
    letters = 1.0
    for tried in (Scenario(_FIRST_LETTERS, 1), scenario):
        one = Load(tried, "closed", 1, 0.0, 1)
        text = next(Prompts(letters, secrets.token_hex(3)).of(one, 0))
        found = await client.ask(text, tried.answer)
        if found.error is not None:
            raise UserError(f"{scenario} cannot be measured: {found.error}")
        letters = len(text) / found.prompt_tokens
    return Prompts(letters, secrets.token_hex(3))


async def _measure(
    server: str,
    client: Client,
    prompts: Prompts,
    load: Load,
    run: int,
    advance: Callable[[int], None],
) -> Measured:
    texts, answer = prompts.of(load, run), load.scenario.answer
    if load.prefix:  # as if others had asked before
        await client.ask(prompts.shared(load, run), 1)
    wave = min(load.requests, load.clients if load.loop == "closed" else _WARM_CLIENTS)
    short = min(answer, _WARM_TOKENS)
    await asyncio.gather(*(client.ask(next(texts), short) for _ in range(wave)))
    return summary(server, load, await send_all(client, load, texts, advance))


async def send_all(
    client: Client, load: Load, texts: Iterator[str], advance: Callable[[int], None]
) -> list[Timed]:
    """Sends the requests of a load when they are due, and waits for all answers."""
    due = iter(load.arrivals())
    loop = asyncio.get_running_loop()
    start, done = loop.time(), []

    async def send() -> None:
        for at in due:
            await asyncio.sleep(start + at - loop.time())
            done.append(await client.ask(next(texts), load.scenario.answer))
            advance(1)

    await asyncio.gather(*(send() for _ in range(load.clients)))
    return done


def summary(server: str, load: Load, done: Sequence[Timed]) -> Measured:
    """What the requests of a load took."""
    good = [each for each in done if each.error is None]
    errors = [each.error for each in done if each.error is not None]
    if not good:
        raise UserError(f"no request of {load.scenario} had an answer: {errors[0]}")
    seconds = max(each.ended for each in good) - min(each.submitted for each in done)
    tokens, read = (sum(getattr(x, name) for x in good) for name in ("tokens", "prompt_tokens"))
    cached = [each.cached_tokens for each in good if each.cached_tokens is not None]
    after_first = [each for each in good if each.tokens > 1 and each.ended > each.first]
    rates = [each.tokens / (each.e2e - each.ttft) for each in after_first]
    between = [(each.e2e - each.ttft) / (each.tokens - 1) for each in after_first]
    return Measured(
        server=server,
        load=load,
        failed=len(errors),
        error=errors[0] if errors else None,
        seconds=seconds,
        prompt_tokens=read / len(good),
        cached_share=sum(cached) / read if len(cached) == len(good) else None,
        tokens=tokens,
        whole_answers=tokens == len(good) * load.scenario.answer,
        ttft=_quantiles([each.ttft for each in good]),
        tpot=_quantiles(between) if between else None,
        e2e=_quantiles([each.e2e for each in good]),
        request_rate=float(np.mean(rates)) if rates else None,
        system_rate=tokens / seconds,
    )


def _quantiles(seconds: Sequence[float]) -> Quantiles:
    parts = np.percentile(seconds, [50, 90, 99])
    return Quantiles(float(np.mean(seconds)), *(float(part) for part in parts))
