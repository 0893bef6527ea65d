"""`jkvq serve` as a process beside this one."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

from jkvq.cli.engine.interrupts import on_end
from jkvq.support.errors import UserError
from jkvq.support.progress import spinner

_ADDRESS = re.compile(r"http://\S+/v1")
_LAST_LINES = 20  # that are shown if it fails
_START, _END = 30, 10  # seconds that it has to listen once it says so, and to end


@contextmanager
def own_server(model: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Starts a server at a free port of this machine; the context has its address.

    Args:
        model: as `jkvq serve` takes it.
        options: of `jkvq serve`, by their names.
    """
    given = [part for name, value in options.items() for part in (_option(name), str(value))]
    code = "from jkvq.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--model", model, "--port", "0", *given]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "JKVQ_API_KEY"},
    )

    def terminate() -> bool:
        process.terminate()
        return False

    assert process.stderr is not None
    with process, on_end(terminate):
        try:
            with spinner(f"Starting a server with {options['cache']}"):
                address = _address(process.stderr)
                _wait_for(address)
            # Its log is read on, or it would stop when the pipe is full
            threading.Thread(target=deque, args=(process.stderr, 0), daemon=True).start()
            yield address
        finally:
            process.terminate()
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _wait_for(address: str) -> None:
    """Until somebody listens: a server says where it will, and then starts."""
    place, end = urlsplit(address), time.monotonic() + _START
    while True:
        try:
            socket.create_connection((place.hostname, place.port), _START).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise UserError(f"nobody listens at {address} after {_START} seconds") from None
            time.sleep(0.05)


def _address(lines: IO[str]) -> str:
    """Where a server says that it listens; what it says instead is raised."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    for line in lines:
        if found := _ADDRESS.search(line):
            return found[0]
        if not line.endswith("...\n"):  # as those of what goes on do
            last.append(line)
    raise UserError(f"the server did not start: {''.join(last).strip().removeprefix('jkvq: ')}")
