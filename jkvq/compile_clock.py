"""How long this process has spent in XLA's compiler."""

import jax

_seconds = 0.0


def compile_seconds() -> float:
    """Seconds of compilation since jkvq was imported."""
    return _seconds


def _listen(event: str, duration: float, **_) -> None:
    global _seconds  # noqa: PLW0603: a clock is a global thing
    if event.startswith("/jax/core/compile/"):
        _seconds += duration


jax.monitoring.register_event_duration_secs_listener(_listen)
