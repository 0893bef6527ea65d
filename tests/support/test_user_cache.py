import sys

import pytest

from jkvq.support.user_cache import cache_folder


def test_cache_folder_is_the_one_that_jkvq_cache_names(monkeypatch, tmp_path):
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "everyone"))
    assert cache_folder() == tmp_path / "ours"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JKVQ_CACHE", "~/ours")
    assert cache_folder() == tmp_path / "ours"


@pytest.mark.skipif(sys.platform != "linux", reason="the XDG folders are Linux's")
@pytest.mark.parametrize("unset", ["", None])
def test_cache_folder_is_the_user_s_when_jkvq_cache_is_not_set(monkeypatch, tmp_path, unset):
    for name in ("JKVQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
        if unset is not None:
            monkeypatch.setenv(name, unset)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jkvq"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "everyone"))
    assert cache_folder() == tmp_path / "everyone" / "jkvq"
