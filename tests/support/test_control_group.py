from pathlib import Path

import pytest

from jkvq.support.control_group import group_free_bytes

GB = 10**9


def member(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    return root


def group(root: Path, name: str, limit: int | str, usage: int, inactive: int = 0) -> None:
    """A group of version 2, as the kernel shows it."""
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def old_group(root: Path, name: str, limit: int, usage: int, inactive: int = 0) -> None:
    """The same of version 1."""
    folder = root / "sys/fs/cgroup/memory" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    stat = f"cache 9\ninactive_file 1\ntotal_inactive_file {inactive}\n"
    (folder / "memory.stat").write_text(stat)


def test_a_container_has_its_limit_less_what_it_uses(tmp_path):
    group(member(tmp_path, "0::/"), "", 8 * GB, 3 * GB)
    assert group_free_bytes(tmp_path) == 5 * GB


def test_page_cache_that_gives_way_counts_as_free(tmp_path):
    group(member(tmp_path, "0::/"), "", 8 * GB, 7 * GB, inactive=6 * GB)
    assert group_free_bytes(tmp_path) == 7 * GB


def test_the_tightest_of_nested_groups_holds(tmp_path):
    member(tmp_path, "0::/user.slice/work/run.scope")
    group(tmp_path, "user.slice", 9 * GB, 8 * GB)
    group(tmp_path, "user.slice/work", 4 * GB, 1 * GB)
    group(tmp_path, "user.slice/work/run.scope", "max", 1 * GB)
    group(tmp_path, "system.slice", 1 * GB, 1 * GB)  # not ours
    assert group_free_bytes(tmp_path) == 1 * GB


def test_a_group_whose_name_is_another_one_outside_is_the_mounted_one(tmp_path):
    """As in a container that sees the host's names but only its own files."""
    group(member(tmp_path, "0::/kubepods/pod1/abc"), "", 2 * GB, 1 * GB)
    assert group_free_bytes(tmp_path) == 1 * GB


def test_groups_of_version_1_are_read(tmp_path):
    member(tmp_path, "5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "0::/docker/abc")
    old_group(tmp_path, "", 2**63 - 4096, 20 * GB)  # what version 1 calls no limit
    old_group(tmp_path, "docker/abc", 6 * GB, 5 * GB, inactive=1 * GB)
    assert group_free_bytes(tmp_path) == 2 * GB


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path):
    group(member(tmp_path, "0::/"), "", 2 * GB, 3 * GB)
    assert group_free_bytes(tmp_path) == 0


@pytest.mark.parametrize("mounted", [True, False])
def test_no_limit_is_none(tmp_path, mounted):
    member(tmp_path, "0::/user.slice")
    if mounted:
        group(tmp_path, "user.slice", "max", 3 * GB)
    assert group_free_bytes(tmp_path) is None
    assert group_free_bytes(tmp_path / "no such system") is None
