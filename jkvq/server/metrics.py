"""What Prometheus may read."""

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jkvq.engine.engine import Stats
from jkvq.engine.writer import FinishReason, Generation

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds
_NEXT = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_KL = (1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3)  # nats
_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Figures of one server: those of its texts, and those that its engine keeps."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self._first = Histogram(
            "jkvq_time_to_first_token_seconds",
            "From a request to the first token of each of its texts, waiting included.",
            buckets=_FIRST,
            registry=self._registry,
        )
        self._next = Histogram(
            "jkvq_time_per_token_seconds",
            "Between two tokens, the mean of each text.",
            buckets=_NEXT,
            registry=self._registry,
        )
        self._texts = Counter(
            "jkvq_texts",
            "Texts that have ended, by what ended them.",
            ["finish_reason"],
            registry=self._registry,
        )
        for reason in get_args(FinishReason):  # all of them are there from the start
            self._texts.labels(reason)

    def about(self, **labels: str) -> None:
        """Notes what is served."""
        Info("jkvq_served", "What is served.", registry=self._registry).info(labels)

    def guard(self) -> "GuardMetrics":
        """Figures of a guard, which are there from now on."""
        return GuardMetrics(self._registry)

    def watch(self, stats: Callable[[], Stats]) -> None:
        """Adds what an engine says of itself."""
        self._registry.register(_EngineFigures(stats))

    def first_token(self, seconds: float) -> None:
        """Notes when a text began."""
        self._first.observe(seconds)

    def ended(self, written: Generation, seconds: float) -> None:
        """Notes the end of a text, so many seconds after its first token."""
        self._texts.labels(written.finish_reason).inc()
        if len(written.tokens) > 1:
            self._next.observe(seconds / (len(written.tokens) - 1))

    def cancelled(self) -> None:
        """Notes a text that nobody waits for any more."""
        self._texts.labels("cancelled").inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class GuardMetrics:
    """Figures of a guard."""

    def __init__(self, registry: CollectorRegistry):
        self._texts, self._diverged, self._left_out, self._warnings = (
            Counter(f"jkvq_guard_{name}", meaning, registry=registry)
            for name, meaning in (
                ("texts", "Texts that were run again with a cache of 16 bits."),
                ("diverged", "Those in which another token was the most likely somewhere."),
                ("left_out", "Texts that were too long to be run again, or too many."),
                ("warnings", "Times that the latest texts were above the limit."),
            )
        )
        self._kl = Histogram(
            "jkvq_guard_kl",
            "KL of the next token from that of a cache of 16 bits, in nats, the mean of each text.",
            buckets=_KL,
            registry=registry,
        )
        self._first = Histogram(
            "jkvq_guard_tokens_before_divergence",
            "Tokens of an answer before the first that would have been another with 16 bits.",
            buckets=_TOKENS,
            registry=registry,
        )

    def replayed(self, kl: float, diverged: int | None) -> None:
        """Notes what a text has shown."""
        self._texts.inc()
        self._kl.observe(kl)
        if diverged is not None:
            self._diverged.inc()
            self._first.observe(diverged)

    def left_out(self) -> None:
        """Notes a text that was not looked at."""
        self._left_out.inc()

    def warned(self) -> None:
        """Notes a warning."""
        self._warnings.inc()


class _EngineFigures(Collector):
    """An engine's `Stats`, as of when they are asked for."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # names are known when figures are

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "running": (stats.running, "Texts that run."),
            "waiting": (stats.waiting, "Texts that wait for a slot or for pages."),
            "slots": (stats.slots, "Texts that may run at once."),
            "pool_bytes": (stats.pool_bytes, "Memory of both pools of pages."),
            "used_bytes": (stats.used_bytes, "Memory of the pages in use."),
            "bf16_bytes": (stats.bf16_bytes, "What the same tokens would take in bf16."),
        }
        for name, (value, meaning) in gauges.items():
            yield GaugeMetricFamily(f"jkvq_{name}", meaning, value)
        used = GaugeMetricFamily("jkvq_pages_used", "Pages in use, by pool.", labels=["pool"])
        pages = GaugeMetricFamily("jkvq_pages", "Pages that there are, by pool.", labels=["pool"])
        counted = {
            "packed": stats.pages,
            "exact": stats.exact_pages,
            "local": stats.local_pages,
        }
        for pool, counts in counted.items():
            for family, count in zip((used, pages), counts, strict=True):
                family.add_metric([pool], count)
        yield from (used, pages)
        counters = {
            "prefilled_tokens": (stats.prefilled_tokens, "Tokens of prompts that were computed."),
            "cached_tokens": (stats.cached_tokens, "Tokens of prompts that were stored before."),
            "drawn_tokens": (stats.drawn_tokens, "Tokens of answers."),
            "preemptions": (stats.preemptions, "Texts that began again as pages were short."),
            "evictions": (stats.evictions, "Stored prompts that made room for others."),
        }
        for name, (value, meaning) in counters.items():
            yield CounterMetricFamily(f"jkvq_{name}", meaning, value)
