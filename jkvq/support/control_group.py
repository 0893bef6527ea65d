"""Memory limits of containers and services: Linux control groups, version 1 and 2."""

from pathlib import Path
from typing import NamedTuple


class _Names(NamedTuple):
    """A group's files, and the line of memory.stat with page cache that gives way on demand."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def group_free_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the limits of this process's groups leave; None where there are no limits.

    The group of a process and all groups above it may have limits, and all of them hold.

    Args:
        root: of the file system.
    """
    membership, mount = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    found = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += _left(mount, group, _V2)
        elif "memory" in controllers.split(","):
            found += _left(mount / "memory", group, _V1)
    return min(found, default=None)


def _left(mount: Path, group: str, names: _Names) -> list[int]:
    """What each limit leaves, from the mounted group down to this process's own.

    A container sees its own group as the mounted one, whatever it is called outside.
    """
    folders = [mount]
    for part in group.strip("/").split("/"):
        folders.append(folders[-1] / part)
    left = []
    for folder in folders:
        try:
            limit = int((folder / names.limit).read_text())  # "max" is none
            usage = int((folder / names.usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(max(0, limit - max(0, usage - int(stat[names.reclaimable]))))
        except (OSError, ValueError, KeyError):
            continue
    return left
