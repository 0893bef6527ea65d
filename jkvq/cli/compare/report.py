"""The report of a comparison: one table of everything, and where the rest is."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jkvq.cli.compare.stages import CONTEXTS, Found, Scores
from jkvq.evaluation.compared import method_of, windows_of, written_windows
from jkvq.evaluation.perplexity import Score
from jkvq.support.atomic import written_whole
from jkvq.support.memory import format_bytes
from jkvq.tasks.report import table
from jkvq.tasks.results import Results

_NOTES = """
Perplexity and KL (nats, from bf16) are of the text's first tokens, every token read as decode would
see it. The error is that of attention's output, squared over its squared norm, in the mean over
layers ([by layer](fidelity.png)). Tokens per second are of 8 requests at once in one engine. A
sequence of {longest:,} tokens takes """

_DRAWN = """
Bits are those that are stored at that length, windows among them. ![KL over bits](kl.png)
"""


@dataclass(frozen=True)
class Findings:
    """All that was measured, by cache; tasks only if some were asked for."""

    memory: Found
    perplexity: Scores
    fidelity: Found
    speed: Found
    tasks: Results | None


def rows(found: Findings) -> Iterator[list[str]]:
    """A row for each cache, behind the header."""
    columns = list(found.tasks or {})
    lengths = [f"bits at {context:,}" for context in CONTEXTS]
    quality = ["perplexity", "KL", "attention output error"]
    yield ["cache", *lengths, *quality, *(each.title for each in columns), "tokens/s"]
    for cache, memory in found.memory.items():
        score = found.perplexity[max(found.perplexity)][cache]
        tasks = [_percent((found.tasks or {})[each][cache].accuracy.value) for each in columns]
        yield [
            cache,
            *(f"{memory['bits'][context]:.2f}" for context in CONTEXTS),
            *(f"{score.ppl:,.3f}", f"{score.kl or 0:.4f}"),
            f"{found.fidelity[cache]['output']:.3g}",
            *tasks,
            f"{found.speed[cache]['engine']:,.1f}",
        ]


def _percent(part: float) -> str:
    """Nothing for NaN: of no request that could be run."""
    return "" if math.isnan(part) else f"{100 * part:.1f}"


def by_windows(scores: Mapping[str, Score]) -> Iterator[list[str]]:
    """A row for each method: bits as stored and KL in each pair of windows, behind the header."""
    windows = sorted({windows_of(cache) for cache in scores})
    yield ["cache", *(f"windows: {written_windows(pair)}" for pair in windows)]
    for method in dict.fromkeys(map(method_of, scores)):
        own = {windows_of(cache): s for cache, s in scores.items() if method_of(cache) == method}
        yield [
            method,
            *(
                f"{own[w].bits_per_element:.2f}, {own[w].kl or 0:.4f}" if w in own else ""
                for w in windows
            ),
        ]


def write_comparison(folder: Path, title: str, found: Findings) -> None:
    """Writes report.md."""
    longest = CONTEXTS[-1]
    with written_whole(folder / "report.md") as file:
        file.write(f"# {title}\n\n")
        file.writelines(table(rows(found)))
        file.write(_NOTES.format(longest=longest))
        taken = (
            f"{format_bytes(memory['bytes'][longest])} ({cache})"
            for cache, memory in found.memory.items()
        )
        file.write(f"{', '.join(taken)}.\n")
        for tokens, scores in found.perplexity.items():
            file.write(f"\n## Bits and KL, first {tokens:,} tokens\n\n")
            file.writelines(table(by_windows(scores)))
        if (folder / "kl.png").exists():
            file.write(_DRAWN)
        if found.tasks:
            file.write("\nTasks, with intervals: [tasks/report.md](tasks/report.md).\n")
