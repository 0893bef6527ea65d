import pytest

import jkvq
from jkvq.support.memory import format_bytes, free_bytes, host_free_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GB", 24e9), ("80 GiB", 80 * 2**30), ("1.5m", 1.5e6), ("1000", 1000), ("2TB", 2e12)],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "24XB", "1.2.3GB", "-1GB", "."])
def test_parse_bytes_of_no_size_is_refused(text):
    with pytest.raises(jkvq.UserError, match="is no size of memory"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (23e9, "23 GB"), (5e15, "5000 TB")],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


def test_free_bytes_is_some_memory():
    free = free_bytes()
    assert free is None or free > 1_000_000


@pytest.mark.parametrize(("limit", "free"), [(3_000_000, 2_000_000), (9_000_000, 5_120_000)])
def test_free_bytes_of_a_container_are_the_least_of_machine_and_limit(tmp_path, limit, free):
    proc, group = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\n")
    assert host_free_bytes(tmp_path) == 5_120_000
    (proc / "self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(str(limit))
    (group / "memory.current").write_text("1000000")
    (group / "memory.stat").write_text("inactive_file 0\n")
    assert host_free_bytes(tmp_path) == free
