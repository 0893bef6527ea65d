"""`jkvq bench serve`: how fast a server of OpenAI's interface is."""

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jkvq.cli.engine.bench import bench, counts, make_folder
from jkvq.cli.engine.own_server import own_server
from jkvq.cli.shared import AsJson, Dtype, Implementation, print_json, print_table
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar, note, say

if TYPE_CHECKING:
    from jkvq.bench.serving.measure import Measured, Quantiles
    from jkvq.bench.serving.traffic import Load

_LEAST, _EACH = 16, 4  # requests of a run: so many for each client, but no fewer than the first
_OPEN = 64  # of a run whose requests come when they come


@bench.command("serve")
def serve_command(
    url: Annotated[
        str | None,
        typer.Option(help="Of a server that runs.", show_default="one of ours, for each cache"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Short name, folder, .gguf file or hub id; with --url what the server calls it.",
            show_default=f"{DEFAULT_MODEL}, or the first that the server names",
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            *("--caches", "--cache"),
            help="Start our server with each; one or more, with commas between.",
            show_default="bf16,saw-int4,jkvq-int4",
        ),
    ] = None,
    scenario: Annotated[
        str,
        typer.Option(
            help="Tokens of prompt and answer, D(in,out); one or more, with commas between."
        ),
    ] = "D(256,64)",
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Clients that send their next request when they have their answer; one or more.",
            show_default="1,4,8",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Requests a second that come at random (Poisson), instead; one or more.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(help="The share of a prompt that all have in common; one or more."),
    ] = "0",
    requests: Annotated[
        int | None,
        typer.Option(
            help="Of each run.", show_default=f"{_EACH} a client, {_LEAST} or more; {_OPEN} by rate"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="JKVQ_API_KEY", help="Of the server at --url.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for serve.json and serve.png.", show_default=False)
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(help="Of our servers; see `jkvq serve`.", show_default="one a client"),
    ] = None,
    memory: Annotated[float | None, typer.Option(help="The same.", show_default="0.9")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="The same, for a single cache.", show_default="the one kept"),
    ] = None,
    dtype: Dtype = None,
    implementation: Implementation = None,
    as_json: AsJson = False,
):
    """Waiting times and tokens per second under load, of any server or of ours by cache.

    Time to the first token (TTFT), from a token to the next (TPOT) and to the end (E2E); tokens per
    second of all requests, and in the mean of one.
    """
    from jkvq.bench.serving.traffic import parse_scenarios
    from jkvq.cache.specs.spec_text import parse_spec, split_names

    own = {
        "slots": slots,
        "memory": memory,
        "calibration": calibration,
        "dtype": dtype,
        "implementation": implementation,
    }
    own = {name: value for name, value in own.items() if value is not None}
    if concurrency is not None and rate is not None:
        raise UserError("concurrency and rate are two ways to send requests: give one of them")
    if rate is None:
        levels: Sequence[float] = counts("concurrency", concurrency or "1,4,8", 65536)
    else:
        levels = _numbers("rate", rate)
    loads = [
        _load(each, rate is not None, level, share, requests, seed)
        for each in parse_scenarios(scenario)
        for share in _numbers("prefix", prefix)
        for level in levels
    ]
    servers: dict[str, AbstractContextManager[str]]
    if url is not None:
        for name in ("cache", *own) if cache is not None else own:
            raise UserError(f"{name} is of a server that is started here: leave it out, or the url")
        servers = {url: nullcontext(url)}
        what, device = model or url, None
    else:
        what, device = model or DEFAULT_MODEL, _device()
        if rate is None:
            own.setdefault("slots", min(4096, max(load.clients for load in loads)))
        most = max(load.requests for load in loads)  # in an open loop all may wait
        names = split_names(cache or "bf16,saw-int4,jkvq-int4")
        for name in names:
            parse_spec(name)
        servers = {
            name: own_server(what, {"cache": name, "max_queue": most, **own}) for name in names
        }
        model = None
    make_folder(out)
    found = _bench(servers, loads, model, api_key if url is not None else None)
    _show(found, f"{what} under load", {"what": what, "device": device}, out, as_json)


def _load(
    scenario: Any, is_open: bool, level: float, share: float, requests: int | None, seed: int
) -> "Load":
    from jkvq.bench.serving.traffic import Load

    count = requests
    if count is None:
        count = _OPEN if is_open else max(_LEAST, int(_EACH * level))
    return Load(scenario, "open" if is_open else "closed", level, share, count, seed)


def _bench(
    servers: "Mapping[str, AbstractContextManager[str]]",
    loads: "Sequence[Load]",
    model: str | None,
    key: str | None,
) -> "list[Measured]":
    try:
        from jkvq.bench.serving.measure import bench_server
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise UserError(
            "bench serve needs aiohttp, which is not installed: pip install 'jkvq[serve]'"
        ) from None

    async def run(name: str, url: str, advance) -> "list[Measured]":
        rows = bench_server(name, loads, url=url, model=model, key=key, advance=advance)
        return [row async for row in rows]

    found = []
    for name, server in servers.items():
        with server as url, count_bar(f"Asking {name}", sum(x.requests for x in loads)) as bar:
            found += asyncio.run(run(name, url, bar.advance))
    return found


def _show(
    found: "Sequence[Measured]",
    title: str,
    about: dict[str, Any],
    out: Path | None,
    as_json: bool,
) -> None:
    from jkvq.bench.serving.figure import serving_figure
    from jkvq.support.pictures import save_picture
    from jkvq.version import VERSION

    written = {**about, "version": VERSION, "rows": [_as_dict(each) for each in found]}
    if out is not None:
        (out / "serve.json").write_text(json.dumps(written, indent=1) + "\n")
        save_picture(serving_figure(found, title), out / "serve.png")
        note(f"Written: {out / 'serve.json'} and {out / 'serve.png'}.")
    for each in found:
        if each.failed:
            say(f"jkvq: {each.server}: {each.failed} requests failed: {each.error}", "yellow")
    if as_json:
        print_json(written)
        return
    print_table(f"{title}: mean, p50, p90, p99", _HEADER, _rows(found))
    if not all(each.whole_answers for each in found):
        note("Some answers ended early: tokens are those that were really made.")


_HEADER = (
    "server",
    "scenario",
    "load",
    "cached",
    "requests",
    "tokens",
    "TTFT, ms",
    "TPOT, ms",
    "E2E, s",
    "tokens/s, request",
    "tokens/s, system",
)


def _rows(found: "Sequence[Measured]") -> Iterator[tuple[str, ...]]:
    for each in found:
        load = each.load
        yield (
            each.server,
            str(load.scenario),
            f"{load.level:g} at once" if load.loop == "closed" else f"{load.level:g} / s",
            "?" if each.cached_share is None else f"{each.cached_share:.0%}",
            f"{load.requests}" + (f", {each.failed} failed" if each.failed else ""),
            f"{each.tokens:,}",
            _times(each.ttft, 1000, ".0f"),
            "" if each.tpot is None else _times(each.tpot, 1000, ".1f"),
            _times(each.e2e, 1, ".2f"),
            "" if each.request_rate is None else f"{each.request_rate:,.1f}",
            f"{each.system_rate:,.1f}",
        )


def _times(seconds: "Quantiles", unit: float, form: str) -> str:
    return " ".join(f"{unit * each:,{form}}" for each in seconds)


def _as_dict(measured: "Measured") -> dict[str, Any]:
    load = measured.load
    told = {**dataclasses.asdict(load), "scenario": str(load.scenario)}
    times = {
        name: None if (found := getattr(measured, name)) is None else found._asdict()
        for name in ("ttft", "tpot", "e2e")
    }
    return {**dataclasses.asdict(measured), **times, "load": told}


def _numbers(name: str, text: str) -> list[float]:
    """With commas between, ascending."""
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{name}={text}: numbers with commas between") from None


def _device() -> str:
    """What our servers run on, asked in a process of its own: this one shall take no GPU."""
    import subprocess
    import sys

    code = "import jax; print(jax.devices()[0].device_kind)"
    asked = [sys.executable, "-c", code]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
