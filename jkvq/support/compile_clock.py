"""How long JAX has spent tracing, compiling and fetching kept programs, by its own events."""

import time
from typing import NamedTuple

import jax

_FETCH = "/jax/compilation_cache/cache_retrieval_time_sec"  # inside the compilation that it spares

_spans: list[tuple[float, float]] = []  # (start, seconds); no span lies inside another
_fetches: list[float] = []


class Compiling(NamedTuple):
    """Seconds of this process since jkvq was imported."""

    compile: float  # tracing and compilation
    fetch: float  # of programs that an earlier process has compiled


def compiling() -> Compiling:
    """What compilation has taken so far."""
    fetch = sum(_fetches)
    return Compiling(sum(seconds for _, seconds in _spans) - fetch, fetch)


def compile_seconds() -> float:
    """Seconds of tracing and compilation."""
    return compiling().compile


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == _FETCH:
        _fetches.append(duration_secs)
    elif event.startswith("/jax/core/compile/"):
        start = time.perf_counter() - duration_secs
        while _spans and _spans[-1][0] >= start:  # happened inside this one
            _spans.pop()
        _spans.append((start, duration_secs))


jax.monitoring.register_event_duration_secs_listener(_listen)
