"""How long JAX has spent tracing and compiling in this process, by its own events."""

import time

import jax

_spans: list[tuple[float, float]] = []  # (start, seconds); no span lies inside another


def compile_seconds() -> float:
    """Seconds of tracing and compilation since jkvq was imported."""
    return sum(seconds for _, seconds in _spans)


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        start = time.perf_counter() - duration_secs
        while _spans and _spans[-1][0] >= start:  # happened inside this one
            _spans.pop()
        _spans.append((start, duration_secs))


jax.monitoring.register_event_duration_secs_listener(_listen)
