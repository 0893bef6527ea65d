import signal
import subprocess
import sys
from typing import Any

import pytest

from jkvq.cli.engine.interrupts import heeded, on_ctrl_c, on_end

COMMAND = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # even in the background
from jkvq.cli import main
from jkvq.cli.engine.interrupts import on_ctrl_c

def app(**how):
    came = threading.Event()
    time.sleep(0.3)  # until it is listened to
    with on_ctrl_c(lambda: came.set() or True):
        print("here", flush=True)
        came.wait()
    print("goes on", flush=True)
    if input() == "wait":
        threading.Event().wait()

main.app = app
main.main()
"""


@pytest.mark.parametrize(
    ("then", "said", "code"), [("end", "", 0), ("wait", "jkvq: interrupted\n", 130)]
)
def test_a_command_may_go_on_after_the_first_ctrl_c(then, said, code):
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", COMMAND], text=True, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "goes on\n"
        process.stdin.write(f"{then}\n")
        process.stdin.flush()
        if code:
            process.send_signal(signal.SIGINT)
        assert process.stderr.read() == said
        assert process.wait() == code


@pytest.mark.parametrize(("meanwhile", "goes_on"), [("on_end", True), ("on_ctrl_c", False)])
def test_a_command_may_go_on_after_sigterm_if_it_says_so(meanwhile, goes_on):
    command = COMMAND.replace("on_ctrl_c", meanwhile)
    pipes: Any = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", command], text=True, **pipes) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == ("goes on\n" if goes_on else "")
        if goes_on:
            process.stdin.write("wait\n")
            process.stdin.flush()
            process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_ctrl_c_is_heeded_once_and_only_meanwhile():
    assert not heeded()
    with on_ctrl_c(lambda: True):
        assert heeded()
        assert not heeded()
    with on_ctrl_c(lambda: False):
        assert not heeded()
    for meanwhile in (on_ctrl_c, on_end):
        with meanwhile(lambda: True):
            pass
        assert not heeded()
