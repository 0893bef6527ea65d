"""The house as DESIGN.md, section 1, has it: who may import whom, and how large things may be."""

import ast
import functools
import graphlib
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("models", "calibration", "pallas_kernels")  # top-level folders, linked into jkvq/
# From the bottom up: a module may import its own room and those below.
ROOMS = [
    "jkvq.support",
    "jkvq.pallas_kernels",
    "jkvq.models",
    "jkvq.cache",
    "jkvq.attention",
    "jkvq.calibration",
    "jkvq.llm",
    "jkvq.scheduling",
    "jkvq.engine",
    "jkvq.bench",
    "jkvq.openai",
    "jkvq.evaluation",
    "jkvq.jobs",
    "jkvq.server",
    "jkvq.tasks",
    "jkvq.loading",
    "jkvq.cli",
    "scripts",
]
# What lies in no room's folder
PLACES = {
    "jkvq": "jkvq.loading",
    "jkvq.version": "jkvq.support",
    "jkvq.defaults": "jkvq.support",
}
LINES, FILES = 60, 12


def _room(module: str) -> str:
    if module in PLACES:
        return PLACES[module]
    room = "scripts" if module.startswith("scripts.") else ".".join(module.split(".")[:2])
    assert room in ROOMS, f"{module} is in no room of the import order: give it one"
    return room


@functools.cache
def _modules() -> dict[str, Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {}
    for line in listed.stdout.splitlines():
        path = Path(line)
        if path.parts[0] == "tests" or not (ROOT / path).exists():
            continue
        parts = (*(("jkvq",) if path.parts[0] in LINKED else ()), *path.with_suffix("").parts)
        modules[".".join(parts).removesuffix(".__init__")] = ROOT / path
    return modules


def _imports(tree: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """The names of the modules that are imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in _modules() else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif inside_functions or not isinstance(node, ast.FunctionDef):
            yield from _imports(node, inside_functions=inside_functions)


def _own_imports(path: Path, *, inside_functions: bool) -> set[str]:
    found = _imports(ast.parse(path.read_text()), inside_functions=inside_functions)
    return {name for name in found if name.split(".")[0] in ("jkvq", "scripts")}


def _of_room(room: str) -> dict[str, Path]:
    return {module: path for module, path in _modules().items() if _room(module) == room}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room):
    upward = [
        f"{module} imports {imported}"
        for module, path in _of_room(room).items()
        for imported in _own_imports(path, inside_functions=True)
        if ROOMS.index(_room(imported)) > ROOMS.index(room)
    ]
    assert upward == []


@pytest.mark.parametrize("room", ROOMS)
def test_imports_of_a_room_make_no_circle(room):
    modules = _of_room(room)
    graph = {
        module: _own_imports(path, inside_functions=False) & modules.keys()
        for module, path in modules.items()
    }
    assert _circle(graph) == []


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_a_circle_would_be_seen():
    assert set(_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_imports_upward_would_be_seen(tmp_path):
    (tmp_path / "x.py").write_text("def f():\n    from jkvq.engine import generate\n")
    found = _own_imports(tmp_path / "x.py", inside_functions=True)
    assert found == {"jkvq.engine.generate"}
    assert _own_imports(tmp_path / "x.py", inside_functions=False) == set()
    rooms = [_room(name) for name in ("jkvq.engine.generate", "jkvq", "scripts.bench.kernels")]
    assert rooms == ["jkvq.engine", "jkvq.loading", "scripts"]


@pytest.mark.parametrize("room", ROOMS)
def test_functions_are_short(room):
    """But for kernels, and commands with their lists of options."""
    long = [
        f"{node.name} in {path.relative_to(ROOT)}: {length} lines"
        for module, path in _of_room(room).items()
        if not module.startswith(("jkvq.pallas_kernels.triton", "jkvq.cli"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and (length := (node.end_lineno or 0) - node.body[0].lineno + 1) > LINES
    ]
    assert long == []


def test_folders_are_small():
    count = Counter(path.parent.relative_to(ROOT) for path in _modules().values())
    assert {str(folder): files for folder, files in count.items() if files > FILES} == {}


@pytest.mark.parametrize("name", LINKED)
def test_source_folders_are_linked_into_the_package(name):
    assert (ROOT / "jkvq" / name).resolve() == ROOT / name
    assert not (ROOT / "jkvq" / name).readlink().is_absolute()
