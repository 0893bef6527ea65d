"""Where a step's time goes: what a GPU ran, as its profiler saw it, by what it is for."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

Profile = Any  # ProfileData, which says no types

# By the names of kernels: ours of attention, ours that store, and products of anybody's.
_KINDS = {
    "attention": re.compile(r"^decode|^merge_partials|cudnn|flash"),
    "write": re.compile(r"^write"),
    "matmuls": re.compile(r"^thin_product|gemm|nvjet|cutlass|cublas|splitk", re.IGNORECASE),
}


@dataclass(frozen=True)
class Split:
    """Milliseconds of a step.

    matmuls: products with weights, and of queries with means.
    attention: over the cache, with the merging of partial results.
    write: what stores the new tokens, and packs those that leave the windows.
    rest: norms, rotary positions, activations, sums, sampling.
    gaps: in which nothing ran.
    """

    matmuls: float
    attention: float
    write: float
    rest: float
    gaps: float


def profiled(run: Callable[[], object]) -> Profile:
    """What ran meanwhile; the result of ``run`` is waited for."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        jax.block_until_ready(run())
        jax.profiler.stop_trace()
        (found,) = Path(folder).rglob("*.xplane.pb")
        return ProfileData.from_file(str(found))


def split_of(profile: Profile, steps: int, milliseconds: float) -> Split:
    """The parts of a step of so many milliseconds, of a profile of several.

    The profiler makes launches slower: what is left of a step's own time, and not of the profile's,
    is its gaps.
    """
    totals = {"matmuls": 0.0, "attention": 0.0, "write": 0.0, "rest": 0.0}
    for name, _, duration in _kernels(profile):
        kind = next((kind for kind, names in _KINDS.items() if names.search(name)), "rest")
        totals[kind] += duration / 1e6 / steps
    return Split(**totals, gaps=max(0.0, milliseconds - sum(totals.values())))


def busy_seconds(profile: Profile) -> float:
    """In which something ran; what ran at the same time on several streams counts once."""
    busy = end = 0.0
    for start, duration in sorted((start, duration) for _, start, duration in _kernels(profile)):
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return busy / 1e9


def _kernels(profile: Profile):
    """Name, start and nanoseconds of everything that ran on a GPU's streams."""
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        yield event.name, event.start_ns, event.duration_ns
