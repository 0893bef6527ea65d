"""`jkvq bench decode` and `jkvq bench prefill`: how long a model takes for its steps."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkvq.cli.engine.bench import (
    ModelOrNone,
    Shape,
    bench,
    counts,
    make_folder,
    plain_model,
    require_one,
)
from jkvq.cli.evaluate.shared import Caches
from jkvq.cli.shared import AsJson, Dtype, Implementation, print_json, print_table
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar, note

if TYPE_CHECKING:
    from jkvq.bench.steps import DecodeStep, PrefillStep
    from jkvq.llm import LLM

Batch = Annotated[str, typer.Option(help="Sequences; one or more, with commas between.")]
Context = Annotated[
    str, typer.Option(help="Tokens of each sequence; one or more, with commas between.")
]
Out = Annotated[
    Path | None, typer.Option(help="A folder for a JSON file and a picture.", show_default=False)
]


@bench.command("decode")
def decode_command(
    model: ModelOrNone = None,
    shape: Shape = None,
    cache: Caches = "bf16,jkvq-int4,jkvq-int2",
    batch: Batch = "1,8",
    context: Context = "1024",
    out: Out = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Milliseconds of a decode step: one token of every sequence, greedy.

    The contexts are random numbers in the cache, so that long ones cost no reading. Calibrations
    are made up: speed does not depend on their numbers.
    """
    from jkvq.bench.steps import bench_decode

    how = _Run("decode", model, shape, cache, batch, context, out, dtype, implementation)
    found = how.measure(bench_decode)
    how.show(found, _DECODE, _decode_rows(found), as_json)


@bench.command("prefill")
def prefill_command(
    model: ModelOrNone = None,
    shape: Shape = None,
    cache: Caches = "bf16,jkvq-int4,jkvq-int2",
    batch: Batch = "1,4",
    context: Context = "1024",
    out: Out = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Tokens of prompts a second, stored in the cache as they are read."""
    from jkvq.bench.steps import bench_prefill

    how = _Run("prefill", model, shape, cache, batch, context, out, dtype, implementation)
    found = how.measure(bench_prefill)
    how.show(found, _PREFILL, _prefill_rows(found), as_json)


@dataclasses.dataclass
class _Run:
    """What is measured, and where it goes."""

    op: str
    model: str | None
    shape: str | None
    cache: str
    batch: str
    context: str
    out: Path | None
    dtype: str | None
    implementation: str | None

    def __post_init__(self):
        from jkvq.attention.implementation import require_known
        from jkvq.cache.specs.spec_text import parse_spec, split_names

        require_one(self.model, self.shape)
        self.specs = {name: parse_spec(name) for name in split_names(self.cache)}
        self.batches = counts("batch", self.batch, 4096)
        self.contexts = counts("context", self.context, 1 << 24)
        require_known(self.implementation)
        make_folder(self.out)

    def measure(self, steps: Callable[..., Iterable[Any]]) -> list[Any]:
        """The steps of every cache, batch and context."""
        llms = self._llms()
        found, total = [], len(llms) * len(self.batches) * len(self.contexts)
        with count_bar(f"Measuring {self.op}", total) as bar:
            for each in steps(llms, self.batches, self.contexts):
                found.append(each)
                bar.advance(1)
        return found

    def _llms(self) -> "Mapping[str, LLM]":
        from jkvq.bench.shapes import with_any_cache

        model = plain_model(self.model, self.shape, self.dtype)
        longest = max(self.contexts) + (self.op == "decode") * 256
        if longest > model.config.context:
            raise UserError(
                f"context={self.context}: the model has {model.config.context} tokens, of which "
                f"{longest - max(self.contexts)} are for what is drawn"
            )
        return {
            name: with_any_cache(model, spec, self.implementation)
            for name, spec in self.specs.items()
        }

    def show(self, found: list[Any], header, rows, as_json: bool) -> None:
        """Writes and prints what was found."""
        import jax

        from jkvq.bench.steps import steps_figure
        from jkvq.support.pictures import save_picture

        what = self.shape or self.model or DEFAULT_MODEL
        device = jax.devices()[0].device_kind
        title = f"{self.op} of {what} on {device}"
        written = {"what": what, "device": device, "rows": [dataclasses.asdict(x) for x in found]}
        if self.out is not None:
            file, picture = (self.out / f"{self.op}.{kind}" for kind in ("json", "png"))
            file.write_text(json.dumps(written, indent=1) + "\n")
            save_picture(steps_figure(found, title), picture)
            note(f"Written: {file} and {picture}.")
        if as_json:
            print_json(written)
        else:
            print_table(title, header, rows)


_SPLIT = ("matmuls", "attention", "write", "rest", "gaps")  # of milliseconds
_DECODE = (
    *("cache", "batch", "context", "ms", *_SPLIT),
    *("tokens/s", "/ bf16", "bytes", "of memory's speed", "most that fit"),
)
_PREFILL = ("cache", "batch", "context", "tokens/s", "/ bf16", "compiled in")


def _decode_rows(found: "Sequence[DecodeStep]"):
    from jkvq.support.memory import format_bytes

    for each in found:
        yield (
            *(each.cache, f"{each.batch:,}", f"{each.context:,}"),
            "does not fit" if each.milliseconds is None else f"{each.milliseconds:.2f}",
            *("" if each.split is None else f"{getattr(each.split, x):.2f}" for x in _SPLIT),
            "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.1f}",
            "" if each.over_bf16 is None else f"{each.over_bf16:.2f}",
            format_bytes(each.bytes),
            "" if each.of_bandwidth is None else f"{each.of_bandwidth:.2f}",
            "" if each.fits is None else f"{each.fits:,}",
        )


def _prefill_rows(found: "Sequence[PrefillStep]"):
    for each in found:
        rate = each.tokens_per_second
        yield (
            *(each.cache, f"{each.batch:,}", f"{each.context:,}"),
            "does not fit" if rate is None else f"{rate:,.0f}",
            "" if each.over_bf16 is None else f"{each.over_bf16:.2f}",
            f"{each.compile_seconds:.0f} s",
        )
