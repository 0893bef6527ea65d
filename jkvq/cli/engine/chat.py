"""`jkvq chat`: a conversation at the terminal, which keeps its cache between turns."""

import io
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from jkvq.cli.engine.interrupts import on_ctrl_c
from jkvq.cli.shared import (
    CalibrationFolder,
    Check,
    ChosenCache,
    Dtype,
    Implementation,
    Model,
    print_table,
)
from jkvq.defaults import DEFAULT_MODEL
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import note, say, spinner

if TYPE_CHECKING:
    from jkvq.cli.engine.conversation import Conversation

_COMMANDS = {
    "/reset": "forget the conversation",
    "/cache": "what the cache takes, and what it would in 16 bits",
    "/stats": "tokens, speed and pages",
    "/help": "this list",
    "/exit": "end, as Ctrl-D does; Ctrl-C ends an answer",
}


def chat(
    model: Model = DEFAULT_MODEL,
    cache: ChosenCache = None,
    calibration: CalibrationFolder = None,
    check: Check = True,
    system: Annotated[
        str | None, typer.Option(help="What the model is told first.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Of each answer, at most.")
    ] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Of each answer.", show_default="a new one each time")
    ] = None,
    memory: Annotated[
        float, typer.Option(help="The part of the free memory that the cache may take.")
    ] = 0.9,
    dtype: Dtype = None,
    implementation: Implementation = None,
):
    """Talk with a model; /help lists what else it understands.

    Where no terminal is, every line that comes in is a message.
    """
    with spinner("Starting"):
        from jkvq.cli.engine.conversation import Conversation
        from jkvq.engine.engine import Engine
        from jkvq.engine.options import Options
        from jkvq.loading.load import load
        from jkvq.support.arguments import number

    options = Options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    number("memory", memory, 0.01, 1, "the part of the free memory to take, 0.01 to 1")
    _require_chat(model, cache, dtype, implementation)
    llm = load(
        model,
        cache=cache,
        calibration=calibration,
        dtype=dtype,
        implementation=implementation,
        check=check,
    )
    conversation = Conversation(Engine(llm, slots=1, memory=memory), options, system)
    if _at_terminal():
        note(f"{model}. /help lists the commands, Ctrl-D ends.")
    for line in _lines():
        if line == "/exit":
            break
        _respond(conversation, line)


def _require_chat(
    model: str, cache: str | None, dtype: str | None, implementation: str | None
) -> None:
    """Refuses a model that cannot chat before its weights are read."""
    from jkvq.attention.implementation import require_known
    from jkvq.cache.specs.spec_text import parse_spec
    from jkvq.models.dtype import compute_dtype
    from jkvq.models.formats.checkpoint import open_checkpoint

    if cache is not None:
        parse_spec(cache)
    compute_dtype(dtype)
    require_known(implementation)
    with spinner(f"Opening {model}"):
        can_chat = open_checkpoint(model).tokenizer().can_chat
    if not can_chat:
        raise UserError(
            f"{model} has no chat template: choose a model that was made for conversations, or "
            "let this one go on from a text with `jkvq generate`"
        )


def _respond(conversation: "Conversation", line: str) -> None:
    """Answers a message or obeys a command; an error ends neither the chat nor the conversation."""
    try:
        if line == "/reset":
            conversation.reset()
        elif line == "/cache":
            header, rows = conversation.cache_rows()
            print_table("The cache of this conversation", header, rows)
        elif line == "/stats":
            print_table("This conversation", ("", ""), conversation.stats_rows())
        elif line == "/help":
            print_table("Commands", ("", ""), _COMMANDS.items())
        elif line.startswith("/"):
            name = line.split(maxsplit=1)[0]
            raise UserError(f"there is no command {name}: {nearest(name, _COMMANDS)}")
        else:
            _answer(conversation, line)
    except UserError as error:
        say(f"jkvq: {error}", "red")


def _answer(conversation: "Conversation", line: str) -> None:
    """Prints an answer as it comes; Ctrl-C ends it with what there is."""
    stop = threading.Event()

    def end_answer() -> bool:
        stop.set()
        return True

    with on_ctrl_c(end_answer):
        pieces = conversation.answer(line, stop)
        with spinner("Reading"):
            first = next(pieces, "")
        for piece in itertools.chain([first], pieces):
            print(piece, end="", flush=True)
    print(flush=True)
    if stop.is_set():
        note("The answer was ended.")
    elif conversation.full:
        note("The model's context is full: /reset begins a new conversation.")
    elif conversation.last is not None and conversation.last.finish_reason == "length":
        note(f"The answer was cut after {len(conversation.last.tokens):,} tokens: see -n.")


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _lines() -> Iterator[str]:
    """Lines with something in them, until no more come."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is refused as a message
    if not _at_terminal():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401 (lets `input` be edited)

    while True:
        try:
            with _terminal_kept():
                line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Lets Ctrl-C leave the terminal as it is now: while a line is edited it echoes nothing."""
    import termios

    place = sys.stdin.fileno()
    before = termios.tcgetattr(place)

    def restore() -> bool:
        termios.tcsetattr(place, termios.TCSADRAIN, before)
        print("\x1b[?2004l", flush=True)  # pasted text comes as if typed
        return False

    with on_ctrl_c(restore):
        yield
