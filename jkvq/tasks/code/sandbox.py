"""Runs Python code that a model wrote, under limits, and says whether it passes a test.

It keeps mistakes from doing harm: code that never ends, that eats memory, or that tries what no
answer needs, such as processes, sockets and files. It is no security boundary: whoever sets out to
break through a guard inside one Python process can, or can find in the frames above the program
what says that a test was passed. Where that matters, run the whole job in a container or a virtual
machine.
"""

import _thread
import builtins
import contextlib
import functools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from typing import IO, Any, NoReturn

_GRACE = 1.0  # seconds in which a process that was told to end can do so by itself

# Kinds of Python's audit events that no answer needs, and which of them do no harm.
_REFUSED = frozenset(
    {
        *("os", "shutil", "subprocess", "pty", "socket", "ctypes", "fcntl", "resource", "sqlite3"),
        "cpython",  # another interpreter, which has no guards
    }
)
_HARMLESS = frozenset(
    {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"}
)
# Modules that reach past the guards; they fail as where they are not installed.
_CLOSED = frozenset(
    {
        *("ctypes", "_ctypes", "_posixshmem", "_posixsubprocess"),
        *("_interpreters", "_xxsubinterpreters"),  # where a guard refuses one, Python 3.12 crashes
    }
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Limits:
    """What code may use.

    cpu_seconds: of computing, whole ones.
    wall_seconds: on the clock; more than the above, for a machine that does other work besides.
    memory: bytes of address space.
    """

    cpu_seconds: int = 3
    wall_seconds: float = 15.0
    memory: int = 4 << 30


def passes(program: str, test: str, limits: Limits | None = None) -> bool:
    """Whether a program runs, and then a test that sees its names runs to its end.

    It may be called from several threads at once. No process and no file is left behind.

    Args:
        program: code of any origin.
        test: code that raises where the program is wrong; it has Python's own builtins, whatever
            the program put into their place.
        limits: what both may use together.
    """
    _require_sandbox()
    return _passes(program, test, limits or Limits())


@functools.cache
def _require_sandbox() -> None:
    """Refuses to go on where not even an empty program passes, and all answers would seem wrong."""
    from jkvq.support.errors import UserError  # noqa: PLC0415 (this file also runs on its own)

    if not _passes("", "", Limits()):
        raise UserError(
            f"{sys.executable} cannot run code in a sandbox here: it takes Linux or macOS, 4 GiB "
            "of address space, and a folder for temporary files"
        )


def _passes(program: str, test: str, limits: Limits) -> bool:
    token = secrets.token_hex(16)
    order = {
        **{"program": program, "test": test, "token": token},
        **{"cpu_seconds": limits.cpu_seconds, "memory": limits.memory},
    }
    with (
        tempfile.TemporaryDirectory(prefix="jkvq-sandbox-") as folder,
        subprocess.Popen(
            [*_walls(), *_python(__file__)],
            bufsize=0,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order).encode() + b"\n")
            said = _heard(process.stdout, limits.wall_seconds)
            process.stdin.close()  # which tells it to end
            _heard(process.stdout, _GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return said == token.encode()


def _heard(pipe: IO[bytes], seconds: float) -> bytes:
    """The first bytes that come through a pipe until it closes or the time is over."""
    said, end = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := end - time.monotonic()) > 0 and selector.select(left):
            piece = os.read(pipe.fileno(), 1024)
            if not piece:
                break
            said = (said + piece)[:1024]
    return said


def _python(*arguments: str) -> list[str]:
    """Python without the user's settings, packages and folders."""
    return [sys.executable, "-I", "-B", "-X", "utf8", *arguments]


def _environment() -> dict[str, str]:
    """Nothing of ours but what finds shared libraries; one thread where numpy would start many."""
    kept = {name: it for name, it in os.environ.items() if name == "LD_LIBRARY_PATH"}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@functools.cache
def _walls() -> tuple[str, ...]:
    """A command that puts another one behind walls of the kernel, where this machine lets us.

    Behind them there is no network, and whatever it starts ends with it.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = (unshare, "--user", "--net", "--pid", "--fork", "--kill-child", "--")
    tried = subprocess.run(
        [*command, *_python("-c", "pass")], capture_output=True, env=_environment(), check=False
    )
    return command if tried.returncode == 0 else ()


def _inside() -> NoReturn:
    """The other side: takes an order, runs it, and says the token if the test came to its end."""
    order = json.loads(sys.stdin.buffer.readline())
    commands, verdict, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    _thread.start_new_thread(_end_with, (commands,))
    token, say, leave = order["token"].encode(), os.write, os._exit
    own_builtins, program = dict(vars(builtins)), types.ModuleType("program")
    sys.modules["program"] = program
    _limit(order["cpu_seconds"], order["memory"])
    _guard()
    try:
        exec(order["program"], vars(program))
        names = {name: it for name, it in vars(program).items() if name not in own_builtins}
        exec(order["test"], {**names, "__builtins__": own_builtins})
        say(verdict, token)
    finally:
        leave(0)  # at once: no thread and no handler of the program outlives its test


def _end_with(pipe: int) -> None:
    """Ends this process when the one at the other end of a pipe closes it or dies."""
    os.read(pipe, 1)
    os._exit(1)


def _limit(cpu_seconds: int, memory: int) -> None:
    """What the kernel watches. Not a byte goes into a file; pipes are none."""
    import resource  # noqa: PLC0415 (not on Windows, where this module can still be imported)

    for what, amount in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(what)
        least = amount if most == resource.RLIM_INFINITY else min(amount, most)
        resource.setrlimit(what, (least, least))


def _guard() -> None:
    """Refuses, from here on, what no answer needs.

    Limits on processes do not hold for root, which is who runs in most containers: so a process is
    refused where Python would start one. Files can be read in Python's own folders, for imports.
    """
    import _posixsubprocess  # noqa: PLC0415 (not on Windows)

    real, decoded, separator = os.path.realpath, os.fsdecode, os.sep
    readable = tuple(
        real(folder) + separator for folder in (sys.prefix, sys.base_prefix, *sys.path, os.getcwd())
    )

    def refuse(*_: object) -> NoReturn:
        raise PermissionError("the sandbox does not allow this")

    def watch(event: str, details: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = details
            is_open = isinstance(path, int)
            if not is_open and (flags & _WRITING or not real(decoded(path)).startswith(readable)):
                refuse()
        elif event == "import" and details[0] in _CLOSED:
            raise ModuleNotFoundError("the sandbox does not have this module")
        elif event.partition(".")[0] in _REFUSED and event not in _HARMLESS:
            refuse()

    # A way to a process without an event. `subprocess` finds the module where it is; an import that
    # would make a new one, with that way whole, is refused.
    _posixsubprocess.__dict__["fork_exec"] = refuse
    sys.addaudithook(watch)


if __name__ == "__main__":
    _inside()
