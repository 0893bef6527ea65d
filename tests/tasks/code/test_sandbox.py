import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jkvq.support.errors import UserError
from jkvq.tasks.code import sandbox
from jkvq.tasks.code.sandbox import Limits, passes

QUICK = Limits(cpu_seconds=1, wall_seconds=0.7)

# Other interpreters in this process, which have no audit hooks of ours
_INTERPRETERS = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"

# Runs each way, and keeps the names of those that nothing refused.
ATTEMPTS = """
reached = []
for way in ways:
    try:
        way()
        reached.append(way.__name__)
    except (PermissionError, ImportError):
        pass
"""


def _inhabitants(folder: Path) -> list[int]:
    """Processes that live in a folder or below."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd").startswith(str(folder)):
                found.append(int(process.name))
    return found


def _until(true, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=20, check=False
    )


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Where the sandboxes of a test are; after it, none is left, and nobody in it."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []
    assert _until(lambda: _inhabitants(folder) == [])


@pytest.fixture
def no_walls(monkeypatch):
    """A machine where the kernel gives us no namespaces: only Python's own guards hold."""
    monkeypatch.setattr(sandbox, "_walls", lambda: ())


def _refused(setup: str, ways: str) -> bool:
    """Whether each of some functions is refused inside, and nothing else happens to them."""
    program = f"{textwrap.dedent(setup)}\nways = [{ways}]\n{ATTEMPTS}"
    return passes(program, "assert len(ways) > 0 and reached == []")


@pytest.mark.parametrize(
    ("program", "test", "passed"),
    [
        ("def double(x):\n    return 2 * x", "assert double(4) == 8", True),
        ("def double(x):\n    return 3 * x", "assert double(4) == 8", False),
        ("def double(x):\n    return 2 * x", "assert tripled(4) == 8", False),
        ("def double(x) return 2", "assert True", False),
        ("1 / 0", "assert True", False),
        ("\0", "assert True", False),
        ("name = '\udc80'", "assert True", False),
        ("x = " + "(" * 9999 + ")" * 9999, "assert True", False),
        ("", "assert True", True),
        ("if __name__ == '__main__':\n    raise SystemExit", "assert True", True),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    b: 'int' = 1",
         "assert A().b == 1", True),
        ("import fractions, statistics, subprocess", "assert fractions.Fraction(1, 2)", True),
    ],
)  # fmt: skip
def test_a_program_passes_if_its_test_comes_to_its_end(program, test, passed):
    assert passes(program, test) == passed


@pytest.mark.parametrize("way", ["exit(0)", "import os; os._exit(0)", "raise SystemExit(0)"])
def test_a_program_that_leaves_before_its_test_has_not_passed(way):
    assert not passes(way, "assert True")
    indented = way.replace("; ", "\n    ")
    assert not passes(f"def f():\n    {indented}", "f()")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "x = 9 ** 9 ** 9",  # holds Python's lock all the while
        "import time\ntime.sleep(60)",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "import os, threading\nos._exit = print\nthreading.Event().wait()",
    ],
)
@pytest.mark.usefixtures("no_walls")
def test_a_program_that_does_not_end_is_ended(program):
    start = time.monotonic()
    assert not passes(program, "assert True", QUICK)
    assert time.monotonic() - start < 6


def test_a_program_that_does_not_end_is_ended_behind_walls_too():
    start = time.monotonic()
    assert not passes("import time\ntime.sleep(60)", "assert True", QUICK)
    assert not passes("while True: pass", "assert True", Limits(cpu_seconds=1))
    assert time.monotonic() - start < 6


def test_memory_is_limited():
    program = """
    try:
        taken = len(bytearray(10 << 30))
    except MemoryError:
        taken = 0
    """
    assert passes(textwrap.dedent(program), "assert taken == 0")
    assert not passes("kept = bytes(600 << 20)", "", Limits(memory=512 << 20))
    assert passes("kept = bytes(600 << 20)", "", Limits(memory=2 << 30))


@pytest.mark.usefixtures("no_walls")
def test_no_process_can_be_started():
    setup = f"""
    import _posixsubprocess, multiprocessing, os, pty, subprocess, sys
    def fork(): os.fork()
    def forkpty(): pty.fork()
    def run(): subprocess.run([{sys.executable!r}, "-c", ""])
    def shell(): os.system("true")
    def popen(): os.popen("true")
    def spawn(): os.posix_spawn({sys.executable!r}, [{sys.executable!r}, "-c", ""], {{}})
    def replaced(): os.execv({sys.executable!r}, [{sys.executable!r}, "-c", ""])
    def forked(): multiprocessing.get_context("fork").Process(target=print).start()
    def spawned(): multiprocessing.get_context("spawn").Process(target=print).start()
    def bare(): _posixsubprocess.fork_exec(*[None] * 23)
    def anew():
        sys.modules.pop("_posixsubprocess", None)
        __import__("_posixsubprocess")
    def interpreter(): __import__({_INTERPRETERS!r}).create()
    def kill(): os.kill(os.getpid(), 0)
    def killpg(): os.killpg(0, 0)
    """
    ways = "fork, forkpty, run, shell, popen, spawn, replaced, forked, spawned, bare, kill, killpg"
    assert _refused(setup, f"{ways}, anew, interpreter")


@pytest.mark.usefixtures("no_walls")
def test_a_fork_bomb_does_not_go_off(home):
    program = """
    import os, time
    for _ in range(6):
        try:
            if not os.fork():
                os.setsid()
        except OSError:
            pass
    time.sleep(60)
    """
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(passes, textwrap.dedent(program), "assert True", QUICK)
        most = 0
        while not bomb.done():
            most = max(most, len(_inhabitants(home)))
            time.sleep(0.02)
    assert not bomb.result()
    assert most == 1


@pytest.mark.usefixtures("no_walls")
def test_a_process_that_got_past_the_guards_ends_with_its_program(monkeypatch):
    unguarded = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    from jkvq.tasks.code import sandbox
    sandbox._guard = lambda: None
    sandbox._inside()
    """
    command = [sys.executable, "-c", textwrap.dedent(unguarded)]
    monkeypatch.setattr(sandbox, "_python", lambda _: command)
    program = "import os, time\nif not os.fork():\n    time.sleep(30)"
    assert passes(program, "assert True", Limits(wall_seconds=2))


def test_no_dead_process_is_left_to_whoever_inherits_it(tmp_path):
    if not sandbox._walls():
        pytest.skip("this machine gives us no namespaces")
    program = """
    import ctypes, os
    from jkvq.tasks.code.sandbox import Limits, passes
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    print(passes("import time; time.sleep(30)", "", Limits(wall_seconds=0.5)))
    try:
        print(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG))
    except ChildProcessError:
        print("no child")
    """
    done = _run([sys.executable, "-c", textwrap.dedent(program)], tmp_path)
    assert done.stdout.split("\n") == ["False", "no child", ""]


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        yield listening


@pytest.mark.usefixtures("no_walls")
def test_no_socket_can_be_made(server):
    setup = f"""
    import asyncio, socket, urllib.request, _socket
    place = ("127.0.0.1", {server.getsockname()[1]})
    def connect(): socket.create_connection(place).sendall(b"hello")
    def made(): _socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    def pair(): socket.socketpair()
    def serve(): socket.create_server(("127.0.0.1", 0))
    def resolve(): socket.gethostbyname("localhost")
    def fetch():
        try:
            urllib.request.urlopen("http://127.0.0.1:%d" % place[1], timeout=1)
        except urllib.error.URLError as error:
            raise error.reason
    """
    with pytest.raises(TimeoutError):
        assert _refused(setup, "connect, made, pair, serve, resolve, fetch")
        server.accept()


def test_files_are_neither_written_nor_read_outside(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    setup = f"""
    import os, pathlib, shutil, sqlite3
    def write(): open("big", "wb").write(bytes(1 << 30))
    def append(): open({str(secret)!r}, "a")
    def low(): os.open("big", os.O_WRONLY | os.O_CREAT)
    def folder(): os.mkdir("folder")
    def link(): os.symlink({str(secret)!r}, "link")
    def remove(): os.remove({str(secret)!r})
    def tree(): shutil.rmtree({str(tmp_path)!r})
    def base(): sqlite3.connect("base").execute("create table t (x)")
    def read(): open({str(secret)!r}).read()
    def relative(): open("../../secret.txt").read()
    def path(): pathlib.Path({str(secret)!r}).read_text()
    def passwords(): open("/etc/passwd").read()
    """
    ways = "write, append, low, folder, link, remove, tree, base"
    assert _refused(setup, f"{ways}, read, relative, path, passwords")
    assert secret.read_text() == "secret"


def test_libraries_cannot_be_loaded_past_the_guards():
    setup = """
    import resource, sys
    def library(): __import__("ctypes")
    def again():
        sys.modules.pop("ctypes", None); sys.modules.pop("_ctypes", None)
        __import__("ctypes").CDLL(None).fork()
    def shared(): __import__("_posixshmem")
    def limit(): resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    """
    assert _refused(setup, "library, again, shared, limit")


def test_the_kernel_stops_what_the_guards_let_through(tmp_path):
    program = """
    import sys
    from jkvq.tasks.code.sandbox import _limit
    _limit(1, 1 << 30)
    for try_it in (lambda: open("big", "wb", 0).write(b"1"), lambda: bytearray(2 << 30),
                   lambda: [open("big", "wb") for _ in range(100)]):
        try:
            try_it()
        except (OSError, MemoryError) as error:
            print(type(error).__name__, getattr(error, "errno", ""))
    sys.stdout.flush()
    while True: pass
    """
    done = _run([sys.executable, "-c", textwrap.dedent(program)], tmp_path)
    assert done.stdout.split("\n") == ["OSError 27", "MemoryError ", "OSError 24", ""]
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "big").stat().st_size == 0


def test_walls_keep_processes_in_and_the_network_out(tmp_path, server):
    if not sandbox._walls():
        pytest.skip("this machine gives us no namespaces")
    program = f"""
    import os, socket, time
    try:
        socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
        print("connected")
    except OSError:
        print("nobody there")
    heard, said = os.pipe()
    if not os.fork():
        os.setsid()
        os.write(said, b"escaped")
        time.sleep(60)
    print(os.read(heard, 7).decode())
    """
    done = _run([*sandbox._walls(), sys.executable, "-c", textwrap.dedent(program)], tmp_path)
    assert done.stdout.split("\n") == ["nobody there", "escaped", ""]
    assert _until(lambda: _inhabitants(tmp_path) == [])


def test_output_goes_nowhere():
    program = "import os\nfor _ in range(4000):\n    os.write(1, bytes(1 << 20)); os.write(2, b'x')"
    assert passes(f"print('passed')\n{program}", "assert True")


def test_the_verdict_cannot_be_written_without_the_token():
    program = """
    import os
    for pipe in range(64):
        try:
            os.write(pipe, b"0" * 32)
        except OSError:
            pass
    """
    assert not passes(textwrap.dedent(program) + "os._exit(0)", "assert False")
    assert not passes("print('passed'); exit(0)", "assert False")


def test_a_flood_of_verdicts_ends_in_time():
    program = """
    import os
    while True:
        for pipe in range(3, 9):
            try:
                os.write(pipe, bytes(1 << 16))
            except OSError:
                pass
    """
    start = time.monotonic()
    limits = Limits(cpu_seconds=20, wall_seconds=0.5)
    assert not passes(textwrap.dedent(program), "assert True", limits)
    assert time.monotonic() - start < 10


def test_the_test_has_builtins_of_its_own():
    program = """
    import builtins, sys
    builtins.abs = abs = lambda x: 0
    builtins.AssertionError = AssertionError = KeyError
    builtins.len = lambda x: 3
    builtins.__import__ = None
    sys.excepthook = lambda *_: None
    def check(candidate): pass
    def f(x): return 1
    """
    test = "import math\ndef check(candidate):\n    assert abs(candidate(1) - {}) < 1e-6\ncheck(f)"
    assert passes(textwrap.dedent(program), test.format(1))
    assert not passes(textwrap.dedent(program), test.format(5))
    assert not passes(textwrap.dedent(program), "assert len('ab') == 3")


def test_threads_end_with_their_program():
    program = """
    import threading, time
    threading.Thread(target=lambda: time.sleep(60)).start()
    """
    start = time.monotonic()
    assert passes(textwrap.dedent(program), "assert threading.active_count() == 2")
    assert time.monotonic() - start < 5


def test_the_environment_is_not_shown(monkeypatch):
    monkeypatch.setenv("SECRET", "secret")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # would take the asserts out of a test
    assert passes("import os", "assert 'SECRET' not in os.environ")
    assert not passes("import os", "assert 'PATH' in os.environ")
    assert not passes("import sandbox", "")  # its own file, whose folder is not in the path


def test_a_machine_where_no_program_can_run_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "_python", lambda _: ["false"])
    sandbox._require_sandbox.cache_clear()
    with pytest.raises(UserError, match="cannot run code in a sandbox here"):
        passes("", "")


def test_limits_that_are_lower_already_stay(tmp_path):
    program = """
    import resource
    from jkvq.tasks.code.sandbox import _limit
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    _limit(1, 2 << 30)
    print(resource.getrlimit(resource.RLIMIT_AS)[1] >> 30)
    """
    assert _run([sys.executable, "-c", textwrap.dedent(program)], tmp_path).stdout == "1\n"


def test_many_programs_run_at_once():
    programs = [f"def f(): return {number % 2}" for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda program: passes(program, "assert f() == 1"), programs))
    assert found == [False, True] * 4


@pytest.mark.parametrize("walls", ["", "sandbox._walls = lambda: ()"])
def test_a_program_ends_with_the_process_that_asked_for_it(tmp_path, walls):
    folder = tmp_path / "orphan"
    folder.mkdir()
    program = f"from jkvq.tasks.code import sandbox\n{walls}\n"
    program += "sandbox.passes('import time; time.sleep(30)', '')"
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(folder)}
    )
    assert _until(lambda: len(_inhabitants(folder)) > 0, 10)
    parent.kill()
    parent.wait()
    assert _until(lambda: _inhabitants(folder) == [])
