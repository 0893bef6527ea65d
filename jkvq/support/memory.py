"""How much memory there is for a cache, and sizes as people write them."""

import re
from pathlib import Path

from jkvq.support.control_group import group_free_bytes
from jkvq.support.errors import UserError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def free_bytes() -> int | None:
    """Memory that can still be allocated on the default device; None where nobody knows."""
    import jax  # noqa: PLC0415 (the rest serves where it cannot be imported)

    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return host_free_bytes()


def ran_out(error: Exception) -> bool:
    """Whether JAX raised this for want of memory on the device."""
    return "RESOURCE_EXHAUSTED" in str(error)


def host_free_bytes(root: Path = Path("/")) -> int | None:
    """What the machine has left, or less where a container may not use it all."""
    meminfo, limits = root / "proc/meminfo", [group_free_bytes(root)]
    if meminfo.exists():
        available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        limits.append(int(available[1]) * 1024 if available else None)
    return min((limit for limit in limits if limit is not None), default=None)


def parse_bytes(text: str) -> int:
    """A size such as ``24GB``, ``80 GiB`` or ``1000000``."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?\s*", text.upper())
    units = _UNITS | _BINARY
    if not match or match[2] not in units or match[1].count(".") > 1 or match[1] == ".":
        raise UserError(f"'{text}' is no size of memory; write it like 24GB or 80GiB")
    return int(float(match[1]) * units[match[2]])


def format_bytes(count: float) -> str:
    """A size in the largest decimal unit that leaves at least one."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 1000 else f"{count:.0f} TB"
