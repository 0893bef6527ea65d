"""Times the kernels on this GPU: microseconds, bytes, bandwidth and ratios, all of one run.

    python -m scripts.bench.kernels --out docs/benchmarks/h200.json
    python -m scripts.bench.kernels --only decode --workloads W1,W2 --caches bf16,int4

Every time is the least of several repeats of a chain of calls, divided by its length; a chain is
long enough that what it takes to start it does not count. What all layers of a step share, the plan
of the work and the rotations in float16, is made outside.
"""

import argparse
import functools
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.attention.step_plan import first_seen
from jkvq.bench.shapes import made_up
from jkvq.bench.steps import stream_bandwidth
from jkvq.cache.basis import make_basis
from jkvq.cache.exact_pages import window_codec
from jkvq.cache.layout import abstract_groups, pages_in_turn, pages_of_window
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.pallas_kernels.decode import decode, plan_decode
from jkvq.pallas_kernels.formats.packed import Packed
from jkvq.pallas_kernels.prefill import prefix_attention
from jkvq.pallas_kernels.settings import write_settings
from jkvq.pallas_kernels.triton.decode import merge_partials
from jkvq.pallas_kernels.triton.decode import plan_decode as plan_for_triton
from jkvq.pallas_kernels.triton.write import write
from jkvq.pallas_kernels.types import (
    DecodeSettings,
    Heads,
    Implementation,
    NewHeads,
    Shift,
    WriteSettings,
    WriteSide,
)
from jkvq.pallas_kernels.work import Span

H = 128


class Workload(NamedTuple):
    """What a layer's decode is timed with."""

    sequences: int
    tokens: int  # of each
    kv_heads: int
    group: int  # query heads of each KV head
    channels: int = H
    window: int | None = None  # of the latest tokens, which are seen; None is all


WORKLOADS = {
    "W1": Workload(32, 16384, 8, 4),
    "W2": Workload(1, 102400, 8, 4),
    "W3": Workload(32, 8192, 8, 4),
    "W4": Workload(128, 8192, 8, 4),
    "W5": Workload(32, 16384, 8, 4),  # of 1,024 to 106,240 tokens, the same in all
    "W6": Workload(8, 32768, 2, 6),
    "G1": Workload(32, 8192, 8, 1),
    "G8": Workload(32, 8192, 4, 8),
    "G16": Workload(32, 8192, 2, 16),
    "H256": Workload(32, 8192, 4, 4, channels=256),
    "H256G1": Workload(32, 8192, 4, 1, channels=256),
    "H256G16": Workload(32, 8192, 1, 16, channels=256),
    "L512": Workload(32, 8192, 4, 4, channels=256, window=512),
    "L1024": Workload(32, 8192, 8, 4, window=1024),
}
CACHES = "bf16,int8,int4,int3,int2,saw-int4,oscar-int2,jkvq-int2,jkvq-int4,tq-k3v3,blockgtq-k3v3"
WRITES = "bf16,int4,saw-int4,oscar-int2,jkvq-int2,jkvq-int4"
CALLS = 10  # that are compiled, one after the other
REPEATS, SECONDS = 5, 0.2  # of a chain, at least: short ones need more repeats to find their least


def frequency(channels: int) -> np.ndarray:
    """Of rotary pairs."""
    return 1e6 ** -(np.arange(channels // 2) * 2 / channels)


def timed(call, state, *args, rounds: int = 10) -> float:
    """Microseconds of ``state = call(state, *args)``, in a chain of ``rounds`` times CALLS."""

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(state, *args):
        def some(_, state):
            for _ in range(CALLS):
                state = call(state, *args)
            return state

        return jax.lax.fori_loop(0, rounds, some, state)

    state = jax.block_until_ready(chain(state, *args))
    times = []
    while len(times) < REPEATS or sum(times) < SECONDS:
        start = time.perf_counter()
        state = jax.block_until_ready(chain(state, *args))
        times.append(time.perf_counter() - start)
    return min(times) / (rounds * CALLS) * 1e6


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 2 GiB."""
    data = jax.random.bits(jax.random.key(0), (1 << 29,), jnp.uint32)

    def copy(data):
        return jax.lax.optimization_barrier(data + jnp.uint32(1))

    return 2 * data.nbytes / timed(copy, data, rounds=1) * 1e6


def random_pages(pages: Packed, key) -> Packed:
    """Pages of numbers that look like a cache's: codes at random, scales about 0.1."""

    def floats(like, scale):
        numbers = jax.random.normal(key, like.shape, jnp.bfloat16) * jnp.bfloat16(scale)
        return jax.lax.bitcast_convert_type(numbers, jnp.uint16)

    if pages.params is None:
        return Packed(jax.jit(lambda: floats(pages.codes, 1))())
    codes = jax.jit(lambda: jax.random.bits(key, pages.codes.shape, jnp.uint16))()
    positive = jax.jit(lambda: floats(pages.params, 0.1) & jnp.uint16(0x7FFF))()
    return Packed(codes, positive, stream=pages.stream)


class Sequences:
    """Sequences stored in shuffled pages of one layer."""

    def __init__(self, spec: CacheSpec, of: Workload, lengths=None):
        self.spec, self.window, self.channels = spec, of.window, of.channels
        B, shape = of.sequences, CacheShape(1, of.kv_heads, of.channels)
        calibration = made_up(shape, spec.key.bits)
        self.basis = make_basis(spec, shape, calibration, frequency(of.channels))
        self.codecs = self.basis.key.codec(0), self.basis.value.codec(0)
        self.lengths = np.full(B, of.tokens) if lengths is None else lengths
        count = -(-self.lengths // spec.page)
        windows = 1 + B * pages_of_window(spec)
        group = abstract_groups(spec, shape, int(count.sum()) + 1, windows)[0]
        self.keys, self.values = (
            random_pages(x, jax.random.key(1)) for x in (group.key, group.value)
        )
        table = np.zeros((B, count.max()), np.int32)
        order = np.random.default_rng(0).permutation(np.arange(1, count.sum() + 1))
        for row, pages in enumerate(np.split(order, np.cumsum(count)[:-1])):
            table[row, : len(pages)] = pages
        self.table = jnp.asarray(table)
        self.windows = None
        if group.exact is not None:
            self.windows = tuple(
                random_pages(x, jax.random.key(2)) for x in (group.exact.key, group.exact.value)
            )

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token seen of the packed ones of each sequence, and of those in 16 bits."""
        spec, oldest = self.spec, jnp.zeros_like(self.lengths)
        if self.window is not None:
            oldest = jnp.maximum(self.lengths - self.window, 0)
        packed = jnp.asarray(self.lengths - spec.sink - spec.recent)
        packed, exact = first_seen(spec, oldest, packed)
        return np.asarray(packed), np.asarray(exact)

    @property
    def nbytes(self) -> int:
        """Of the pages of packed tokens and the tokens in windows that are seen."""
        spec, (first, first_exact) = self.spec, self.seen
        arrays, exact = jax.tree.leaves((self.keys, self.values)), spec.sink + spec.recent
        per_page = sum(x.nbytes // x.shape[1] for x in arrays)
        pages = -(-(self.lengths - exact) // spec.page) - first // spec.page
        windows = jax.tree.leaves(self.windows)
        per_token = sum(x.nbytes // (x.shape[1] * spec.page) for x in windows)
        return int(pages.sum()) * per_page + int((exact - first_exact).sum()) * per_token


def ragged(of: Workload) -> np.ndarray:
    """Lengths from 1,024 to 32,768 tokens, and a longer one: in all as many as equal ones have."""
    spread = np.geomspace(512, 32768, of.sequences)
    tokens = of.sequences * of.tokens
    lengths = np.round(spread * (tokens / spread.sum()) / 64).astype(int) * 64
    lengths = np.clip(lengths, 512, 32768)
    lengths[np.argsort(lengths)[of.sequences // 2]] += tokens - lengths.sum()
    return lengths


def time_decode(
    spec: CacheSpec,
    workload: str,
    implementation: Implementation = "pallas",
    settings: DecodeSettings | None = None,
    window_settings: DecodeSettings | None = None,
    together: bool | None = None,
) -> tuple[float, int]:
    """Microseconds of decode and merge, and the bytes they read; settings are Triton's."""
    of = WORKLOADS[workload]
    B, _, K, G, C, _ = of
    data = Sequences(spec, of, ragged(of) if workload == "W5" else None)
    exact = spec.sink + spec.recent

    def make_plan(tokens, first, table, codecs, settings):
        length, page = jnp.asarray(tokens, jnp.int32), spec.page
        first = None if of.window is None else jnp.asarray(first, jnp.int32)
        if settings is not None:
            return plan_for_triton(length, first=first, page=page, kv_heads=K, settings=settings)
        how = {"page": page, "implementation": implementation, "first": first}
        return plan_decode(length, table, codecs, Heads(K, G, C), **how)

    first, first_exact = data.seen
    plan = make_plan(data.lengths - exact, first, data.table, data.codecs, settings)
    window_plan, table = None, data.table
    of_key, of_value = map(window_codec, spec.window_sides)
    held = of_key, of_value
    if data.windows is not None:
        table = jnp.asarray(pages_in_turn(spec, B, spec.exact_pages))
        exact_plan = np.full(B, exact), first_exact, table, held
        window_plan = make_plan(*exact_plan, window_settings)
    key, columns = data.basis.key, data.table.shape[1]
    # The pages of packed tokens and those of the windows, which each sequence has elsewhere
    angles = key.angles(spec.page_middle(jnp.arange(columns + table.shape[1])))
    slot_page = columns + jnp.arange(table.shape[1] * spec.page) // spec.page
    slot_page = jnp.broadcast_to(slot_page, (B, slot_page.size))
    q = jax.random.normal(jax.random.key(3), (B, K * G, C), jnp.bfloat16)
    if data.basis.key.matrices is not None:
        q = q.astype(jnp.float32)  # as the write kernel rotates it

    def attend(q, keys, values, block_table, plan, windows, window_plan, slot_page):
        shift = window_shift = None
        if angles is not None:
            queries = key.mean_queries(q[:, None], 0)
            assert queries is not None
            queries = queries[:, 0]
            shift = Shift(queries, angles.turns)
            window_shift = Shift(queries, angles.turns, slot_page)
        spans = [Span(keys, values, data.codecs, block_table, plan, shift)]
        if windows is not None:
            spans.append(Span(windows[0], windows[1], held, table, window_plan, window_shift))
        parts = decode(q, spans, 0, scale=C**-0.5, together=together)
        out, _ = merge_partials(parts, q.shape[1])
        return q + (out * 1e-30).astype(q.dtype)

    args = q, data.keys, data.values, data.table, plan, data.windows, window_plan, slot_page
    return timed(attend, *args), data.nbytes


def time_write(
    spec: CacheSpec, tokens: int, *, queries: bool = False, settings: WriteSettings | None = None
) -> float:
    """Microseconds to store tokens of 8 heads, keys and values; with or without their queries."""
    shape = CacheShape(1, 8, H)
    basis = make_basis(spec, shape, made_up(shape, spec.key.bits), frequency(H))
    pages = max(tokens // spec.page, tokens if tokens < 1024 else 0) + 1
    group = abstract_groups(spec, shape, pages, 1)[0]
    k, v = (jax.random.normal(jax.random.key(i), (1, tokens, 8, H), jnp.bfloat16) for i in (0, 1))
    q = jax.random.normal(jax.random.key(2), (1, tokens, 32, H), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(np.arange(1, pages))
    at = np.arange(tokens)
    page = order[at // spec.page] if tokens >= 1024 else order[at]
    page, slot = (jnp.asarray(x[None], jnp.int32) for x in (page, at % spec.page))
    settings = settings or write_settings(tokens)
    codecs = basis.key.codec(0), basis.value.codec(0)
    angles = basis.key.angles(spec.page_middle(page))
    wide = None if angles is None else angles.wide
    transforms = basis.key.transform(0, wide), basis.value.transform(0, None)

    def store(state, transforms, k, v, q, page, slot):
        key, value, _ = write(
            WriteSide(state[0], NewHeads.of(k), codecs[0], transforms[0]),
            WriteSide(state[1], NewHeads.of(v), codecs[1], transforms[1]),
            *(0, page, slot),
            queries=NewHeads.of(q) if queries else None,
            settings=settings,
        )
        return key, value

    state = tuple(random_pages(x, jax.random.key(3)) for x in (group.key, group.value))
    return timed(store, state, transforms, k, v, q, page, slot, rounds=20)


def time_prefill(cache: str | None) -> tuple[float, int]:
    """Microseconds of 2,048 queries over a prefix of 30,720 tokens, and the temporary bytes.

    None is a contiguous bfloat16 prefix through cuDNN.
    """
    S, T, K, N = 30720, 2048, 8, 32
    q = jax.random.normal(jax.random.key(0), (1, T, N, H), jnp.bfloat16)
    data = Sequences(parse_spec(cache or "bf16"), Workload(1, S, K, N // K))
    args = [data.keys, data.values, data.table]
    if cache is None:
        args = [jax.random.normal(jax.random.key(i), (1, S, K, H), jnp.bfloat16) for i in (1, 2)]

    def attend(q, keys, values, table=None):
        if table is None:
            return jax.nn.dot_product_attention(q, keys, values, implementation="cudnn")
        pages = keys, values, *data.codecs, 0, table, jnp.full(1, S, jnp.int32)
        return prefix_attention(q, *pages, scale=H**-0.5, fused="cudnn")[0].astype(q.dtype)

    def again(q, *args):
        return q + attend(q, *args) * jnp.bfloat16(1e-30)

    memory = jax.jit(attend).lower(q, *args).compile().memory_analysis()
    assert memory is not None
    return timed(again, q, *args, rounds=1), memory.temp_size_in_bytes


def time_torch(workload: str) -> float | None:
    """Microseconds of PyTorch's attention over contiguous bfloat16 keys and values, for scale."""
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return None
    B, S, K, G, C, window = WORKLOADS[workload]
    S = min(S, window or S)
    k, v = (torch.randn(B, K, S, C, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(B, K * G, 1, C, dtype=torch.bfloat16, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    for _ in range(3):
        attend(q, k, v, enable_gqa=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        attend(q, k, v, enable_gqa=True)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 100


def decode_rows(workload: str, caches: list[str], implementations: list[str]) -> Iterator[dict]:
    """Times of one workload, with the speed-up over the least of bf16 before.

    "together" is pallas with windows in the launch of packed pages.
    """
    base = None
    for cache in caches:
        for implementation in implementations:
            way: Any = {"implementation": implementation}
            if implementation == "together":
                way = {"together": True}
            us, size = time_decode(parse_spec(cache), workload, **way)
            row = {"cache": cache, "implementation": implementation, "us": us, "bytes": size}
            if cache == "bf16":
                base = min(us, base or us)
            if base is not None:
                row["speedup"] = base / us
            yield row
    torch_us = time_torch(workload) if workload != "W5" else None
    if torch_us is not None:
        yield {"cache": "bf16, torch", "us": torch_us}


def main() -> None:
    """Runs the benchmarks that are asked for, prints them and writes them down."""
    parser = argparse.ArgumentParser(description="Times the kernels on this GPU.")
    parser.add_argument("--only", choices=["decode", "write", "prefill"], help="one op alone")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--caches", default=CACHES)
    parser.add_argument("--implementations", default="pallas,triton", help="of decode")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("there is no GPU here")
    stream, copy = stream_bandwidth(), copy_bandwidth()
    found = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "stream_bytes_per_s": stream,
        "copy_bytes_per_s": copy,
        "decode": [],
        "write": [],
        "prefill": [],
    }
    print(f"{found['device']}, jax {jax.__version__}: stream {stream / 1e12:.2f} TB/s, ", end="")
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)

    def note(op: str, **row):
        found[op].append(row)
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
        print(op, *(f"{key}={value}" for key, value in shown.items()), flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))

    if args.only in (None, "decode"):
        for workload in args.workloads.split(","):
            caches, ways = (text.split(",") for text in (args.caches, args.implementations))
            for row in decode_rows(workload, caches, ways):
                if size := row.get("bytes"):
                    rate = size / row["us"] * 1e6
                    row |= {"of_stream": rate / stream, "of_copy": rate / copy}
                note("decode", workload=workload, **row)
    if args.only in (None, "write"):
        for tokens in (8192, 32):
            for cache in WRITES.split(","):
                spec = parse_spec(cache)
                row = {"tokens": tokens, "cache": cache}
                row["us"] = time_write(spec, tokens, queries=False)
                if tokens < 1024 and spec.key.rotation != "none":
                    row["us_with_queries"] = time_write(spec, tokens, queries=True)
                note("write", **row)
    if args.only in (None, "prefill"):
        base, _ = time_prefill(None)
        note("prefill", cache="bf16, contiguous, cuDNN", us=base)
        for cache in ("bf16", "int4", "int2"):
            us, temporary = time_prefill(cache)
            note("prefill", cache=cache, us=us, of_cudnn=base / us, temporary_bytes=temporary)


if __name__ == "__main__":
    main()
