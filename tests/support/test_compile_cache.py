"""In processes of their own: what JAX has been told holds for all of one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax, jax.monitoring
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from jkvq.support.compile_cache import keep_compiled_programs
keep_compiled_programs()
jax.jit(lambda x: x * 2 + 1)(1.0)
jax.jit(lambda x: x * 3 + 2)(1.0)
hits = events.count("/jax/compilation_cache/cache_hits")
print(hits, jax.config.jax_compilation_cache_dir)
"""


def run(folder: Path, **environment: str) -> tuple[int, str]:
    """How many programs came from a cache, and where that is."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**kept, "JKVQ_CACHE": str(folder), "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    hits, place = found.stdout.split()
    return int(hits), place


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("compiled/*-cache"))


def test_a_second_process_compiles_nothing_even_if_the_folder_has_moved(tmp_path):
    assert run(tmp_path / "first") == (0, str(tmp_path / "first" / "compiled"))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    for place in ("first", "copy"):
        assert run(tmp_path / place)[0] == len(entries(tmp_path / place)) >= 1


def test_damaged_programs_are_made_again_once_and_without_a_word(tmp_path):
    """Some have lost their end, others everything."""
    run(tmp_path)
    whole = entries(tmp_path)
    assert len(whole) >= 2
    for number, entry in enumerate(whole):
        entry.write_bytes(entry.read_bytes()[:-20] if number % 2 else b"")
    assert run(tmp_path)[0] == 0  # a warning would be an error here
    assert entries(tmp_path) == whole
    assert run(tmp_path)[0] == len(whole)


def test_a_users_own_place_is_left_alone(tmp_path):
    own = str(tmp_path / "own")
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=own)[1] == own
    assert run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")[1] == "None"
    assert entries(tmp_path) == []


def test_where_nothing_can_be_kept_programs_serve_the_process(tmp_path):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file" / "below") == (0, "None")
