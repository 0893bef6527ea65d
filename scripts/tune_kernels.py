"""Finds the kernels' best settings on this GPU and writes them where the kernels look for them.

python -m scripts.tune_kernels
"""

import argparse
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import jax

from jkvq.cache.specs.spec_text import parse_spec
from jkvq.pallas_kernels.settings import is_hopper, tuned_file
from jkvq.pallas_kernels.types import DecodeSettings, WriteSettings
from scripts.bench.kernels import time_decode, time_write

# programs per multiprocessor, warps, stages
DECODE = {
    "float": (("bf16",), list(itertools.product((3, 4, 6), (2, 4), (2, 3)))),
    "windows": (("oscar-int2",), list(itertools.product((2, 4, 8), (2, 4), (1, 2)))),
    "packed": (("int4", "int2"), list(itertools.product((6, 8, 12), (1, 2), (2, 3)))),
    "stream": (("blockgtq-k3v3",), list(itertools.product((6, 8), (1, 2), (1, 2, 3)))),
}
WORKLOADS = ("W1", "W2")
# tokens, warps
WRITE = {
    8192: list(itertools.product((16, 32, 64, 128), (2, 4, 8))),
    32: list(itertools.product((16, 32), (1, 2, 4, 8))),
}
WRITTEN = ("int4", "saw-int4", "oscar-int2", "jkvq-int2")


def best(settings: list, measure, what: str) -> list[int]:
    """The setting with the least geometric mean of times, over the measures that it can run."""
    times = {}
    for setting in settings:
        try:
            times[setting] = measure(setting)
        except Exception as error:  # too much shared memory or registers: not a candidate
            print(what, setting, "does not run:", str(error).split("\n")[0][:100], flush=True)
            continue
        print(what, setting, f"{times[setting]:.1f}", flush=True)
    return list(min(times, key=times.__getitem__))


def geometric_mean(times: list[float]) -> float:
    """Of some times."""
    product = 1.0
    for time in times:
        product *= time
    return product ** (1 / len(times))


def time_triton(kind: str, setting) -> float:
    """Microseconds of decode, if Triton reads pages of a kind with this setting."""
    per_core, warps, stages = setting
    settings = DecodeSettings(per_core * jax.devices()[0].core_count, warps, stages)
    return _time(kind, {"window_settings" if kind == "windows" else "settings": settings})


def faster_backend(kind: str, setting) -> str:
    """The one that reads pages of a kind faster, all others read by what is best for them."""
    if not is_hopper():
        return "triton"
    times = {"triton": time_triton(kind, setting), "mosaic": _time(kind, {})}
    print("decode", kind, times, flush=True)
    return min(times, key=times.__getitem__)


def _time(kind: str, settings: Any) -> float:
    way = "mosaic" if is_hopper() else "triton"
    caches, _ = DECODE[kind]
    return geometric_mean(
        [
            time_decode(parse_spec(cache), workload, way, **settings)[0]
            for cache in caches
            for workload in WORKLOADS
        ]
    )


def main() -> None:
    """Tunes every op, and writes the settings of this device."""
    parser = argparse.ArgumentParser(description="Tunes the kernels for this GPU.")
    parser.add_argument("--out", type=Path, help="instead of the package's own file")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU here")

    def writing(tokens):
        def measure(setting):
            settings = WriteSettings(*setting)
            times = [time_write(parse_spec(name), tokens, settings=settings) for name in WRITTEN]
            return geometric_mean(times)

        return measure

    decode = {
        kind: best(settings, functools.partial(time_triton, kind), f"decode {kind}")
        for kind, (_, settings) in DECODE.items()
    }
    found = {
        "backend": {kind: faster_backend(kind, setting) for kind, setting in decode.items()},
        "decode": decode,
        "write": {
            name: best(WRITE[tokens], writing(tokens), f"write {tokens}")
            for name, tokens in (("many", 8192), ("few", 32))
        },
    }
    out = args.out or tuned_file()
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
