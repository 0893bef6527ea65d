import itertools
import threading
import time
from pathlib import Path

import pytest
from filelock import Timeout

from jkvq.support.atomic import drafted, reading, require_vacant, written_whole
from jkvq.support.errors import UserError
from jkvq.support.lock import lock_beside


def write(folder: Path, text: str) -> None:
    with drafted(folder, replace=True) as draft:
        (draft / "one").write_text(text)
        (draft / "two").write_text(text)


def test_a_reader_finds_one_whole_folder_while_another_replaces_it(tmp_path):
    folder, enough = tmp_path / "kept", threading.Event()
    write(folder, "0")

    def replace():
        for version in itertools.count(1):
            write(folder, str(version))
            if enough.is_set():
                return

    writer = threading.Thread(target=replace)
    writer.start()
    seen = set()
    try:
        while len(seen) < 10:
            with reading(folder):  # FileNotFoundError without it
                first, second = ((folder / name).read_text() for name in ("one", "two"))
            assert first == second
            seen.add(first)
            time.sleep(0.001)  # lets the writer in
    finally:
        enough.set()
        writer.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kept.lock", "kept"]
    assert sorted(path.name for path in folder.iterdir()) == ["one", "two"]


def test_reading_locks_nothing_that_is_never_replaced(tmp_path):
    with drafted(tmp_path / "once") as draft:
        (draft / "one").write_text("1")
    with reading(tmp_path / "once"):
        assert (tmp_path / "once" / "one").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_reading_goes_on_when_the_lock_cannot_be_opened(tmp_path):
    write(tmp_path / "kept", "1")
    lock = tmp_path / ".kept.lock"
    lock.unlink()
    lock.mkdir()  # no user can open it for writing, not even root
    with reading(tmp_path / "kept"):
        assert (tmp_path / "kept" / "one").read_text() == "1"


def test_reading_locks_the_current_folder_too(tmp_path, monkeypatch):
    write(tmp_path / "kept", "1")
    monkeypatch.chdir(tmp_path / "kept")
    with reading(Path()), pytest.raises(Timeout):
        lock_beside(tmp_path / "kept").acquire(timeout=0)


@pytest.mark.parametrize("kind", ["current", "link", "mounted"])
def test_what_no_folder_can_replace_is_refused(kind, tmp_path, monkeypatch):
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    (tmp_path / "link").symlink_to("new")
    monkeypatch.setattr("os.path.ismount", lambda path: path.name == "mounted")
    require_vacant(tmp_path / "new")
    with pytest.raises(UserError, match="no folder can take its place; name a new folder"):
        require_vacant(tmp_path / kind)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with written_whole(path) as file:
        file.write("one")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), written_whole(path) as file:
        file.write("two")
        raise ZeroDivisionError
    assert path.read_text() == "one"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_file_that_cannot_be_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: "), written_whole(tmp_path / "file/x"):
        pass
