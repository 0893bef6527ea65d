"""The import order of DESIGN.md, section 1: who may import whom."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom up: a module may import its own rank and those below.
RANKS = [
    ["jkvq.support", "jkvq.version", "jkvq.defaults"],
    ["jkvq.pallas_kernels"],
    ["jkvq.cache.shape"],
    ["jkvq.cache", "jkvq.attention", "jkvq.models"],
    ["jkvq.calibration"],
    ["jkvq.llm", "jkvq.engine", "jkvq.evaluation", "jkvq.loading"],
    ["jkvq"],
    ["jkvq.cli"],
    ["scripts"],
]


def _rank(module: str) -> int:
    ranks = [
        rank
        for rank, names in enumerate(RANKS)
        if any(
            module == name or (name != "jkvq" and module.startswith(f"{name}.")) for name in names
        )
    ]
    assert ranks, f"{module} has no place in the import order: give it one"
    return ranks[0]


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
        if path.parts[0] in ("tests",) or (ROOT / path).is_symlink():
            continue
        parts = path.with_suffix("").parts
        name = ".".join(parts if parts[0] in ("jkvq", "scripts") else ("jkvq", *parts))
        modules[name.removesuffix(".__init__")] = ROOT / path
    return modules


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.split(".")[0] in ("jkvq", "scripts")]


def test_imports_run_one_way():
    upward = [
        f"{module} imports {imported}"
        for module, path in _modules().items()
        for imported in _imports(path)
        if _rank(imported) > _rank(module)
    ]
    assert upward == []


def test_imports_upward_would_be_seen(tmp_path):
    (tmp_path / "x.py").write_text("def f():\n    from jkvq.engine.generate import generate\n")
    assert _imports(tmp_path / "x.py") == ["jkvq.engine.generate"]
    assert (
        _rank("jkvq.engine.generate")
        > _rank("jkvq.models.decoder")
        > _rank("jkvq.pallas_kernels.reference.merge")
    )


@pytest.mark.parametrize("name", ["models", "calibration", "pallas_kernels"])
def test_source_folders_are_linked_into_the_package(name):
    assert (ROOT / "jkvq" / name).resolve() == ROOT / name
    assert not (ROOT / "jkvq" / name).readlink().is_absolute()
