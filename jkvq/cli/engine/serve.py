"""`jkvq serve`: OpenAI's interface over HTTP."""

import re
from typing import Annotated

import typer

from jkvq.cli.engine.interrupts import on_end
from jkvq.cli.shared import (
    CalibrationFolder,
    Check,
    ChosenCache,
    Dtype,
    Implementation,
    Model,
)
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError
from jkvq.support.progress import note, say, spinner

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Model = DEFAULT_MODEL,
    cache: ChosenCache = None,
    calibration: CalibrationFolder = None,
    check: Check = True,
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 is for everyone who reaches this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    memory: Annotated[
        float, typer.Option(help="The part of the free memory that the cache may take.")
    ] = 0.9,
    slots: Annotated[
        int | None,
        typer.Option(help="Texts that run at once.", show_default="8 on a CPU and 64 on a GPU"),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Texts that may wait for a slot; others are told to come again.")
    ] = 256,
    drain: Annotated[
        float, typer.Option(help="Seconds that requests have to end at SIGTERM or Ctrl-C.")
    ] = 30.0,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="JKVQ_API_KEY",
            help="What clients must send; better in the variable, as others see options.",
            show_default="none is asked for",
        ),
    ] = None,
    guard: Annotated[
        float,
        typer.Option(
            help="The share of texts that are run again with 16 bits when nobody waits; /metrics "
            "and the page say what few bits do to them."
        ),
    ] = 0.0,
    guard_limit: Annotated[
        float,
        typer.Option(help="The KL in nats above which the guard warns, and names another cache."),
    ] = 0.1,
    dtype: Dtype = None,
    implementation: Implementation = None,
):
    """Serve a model to OpenAI's clients: /v1/chat/completions, /v1/completions and more."""
    with spinner("Starting"):
        from jkvq.cache.specs.spec_text import parse_spec, spec_text
        from jkvq.loading.load import load_both
        from jkvq.support.arguments import INT32, number, whole

        try:
            from jkvq.server.guard import guarded, require_packed
            from jkvq.server.server import Server, bind, log_to_stderr
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("jkvq"):
                raise
            raise UserError(
                f"the server needs {error.name}, which is not installed: pip install 'jkvq[serve]'"
            ) from None

    number("memory", memory, 0.01, 1, "the part of the free memory to take, 0.01 to 1")
    whole("slots", 1 if slots is None else slots, 1, 4096, "texts that run at once, 1 to 4096")
    whole("max_queue", max_queue, 0, INT32, "texts that may wait, 0 or more")
    number("drain", drain, 0, 86400, "seconds, 0 to 86400")
    number("guard", guard, 0, 1, "the share of texts to run again, 0 to 1")
    number("guard_limit", guard_limit, 0, 100, "a KL in nats, 0 to 100")
    if guard and cache is not None:
        require_packed(parse_spec(cache))
    key = None if api_key is None else _checked_key(api_key)
    place = bind(host, port)  # before anything is loaded
    plain, llm = load_both(
        model,
        cache=cache,
        calibration=calibration,
        dtype=dtype,
        pool_tokens=None,
        implementation=implementation,
        check=check,
    )
    how = {"share": guard, "limit": guard_limit, "calibration": calibration}
    server = Server(
        llm,
        place,
        name=served_name(model),
        memory=memory,
        slots=slots,
        max_queue=max_queue,
        drain=drain,
        key=key,
        guarded=guarded(plain, llm, **how) if guard else None,
    )
    del plain  # its weights, where the cache has others folded in, are only a guard's
    with spinner("Compiling"):
        server.warm_up()
    log_to_stderr()
    if host not in _LOOPBACK and key is None:
        say(f"jkvq: whoever reaches {host} may use this server: set JKVQ_API_KEY", "yellow")
    shown_host = f"[{host}]" if ":" in host else host
    address = f"http://{shown_host}:{place.getsockname()[1]}/v1"
    engine = server.driver.engine
    note(f"{served_name(model)} with {cache or spec_text(llm.spec)}, {engine.slots} texts at once")
    say(f"{address} (Ctrl-C ends it)", "bold")

    def end() -> bool:
        note(f"Ending: requests have {drain:g} s; once more ends at once.")
        server.end()
        return True

    with on_end(end):
        server.run()


def _checked_key(given: str) -> str:
    """A key that a header can carry; a file that it was read from may have ended its line."""
    key = given.strip()
    if not re.fullmatch("[!-~]+", key):
        raise UserError(
            "the API key is empty or has characters that HTTP cannot carry: use letters, digits "
            "and signs of ASCII, without spaces"
        )
    return key


def served_name(model: str) -> str:
    """What clients call a model: its short name or hub id, or the last part of a path."""
    from pathlib import Path

    path = Path(model)
    return path.resolve().name if path.exists() else model
