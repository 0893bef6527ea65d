"""Caches as comparisons name them: each in several windows, and with a calibration of its own.

A name is a cache's text or a baseline's name. ``calibration=DIR`` may stand among its overrides, so
that one cache is compared with itself under another calibration.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from jkvq.cache.specs.spec_text import parse_spec
from jkvq.evaluation.baselines import BASELINES
from jkvq.support.errors import UserError

Windows = tuple[int, int]  # tokens at the beginning and at the end of a sequence
_WINDOWS, _CALIBRATION = ("sink=", "recent="), "calibration="


def cache_of(name: str) -> str:
    """The cache, or the baseline, without its calibration."""
    return _without(name, (_CALIBRATION,))


def folder_of(name: str) -> Path | None:
    """The folder of the calibration that a name gives."""
    given = [part for part in name.split(",") if part.startswith(_CALIBRATION)]
    if len(given) > 1:
        raise UserError(f"cache '{name}': calibration is given twice; give it once")
    return Path(given[0].removeprefix(_CALIBRATION)) if given else None


def method_of(name: str) -> str:
    """What caches have in common that differ in their windows alone."""
    return _without(name, _WINDOWS)


def windows_of(name: str) -> Windows:
    """The windows of a cache; a baseline has none that could be others."""
    if cache_of(name) in BASELINES:
        return 0, 0
    spec = parse_spec(cache_of(name))
    return spec.sink, spec.recent


def in_windows(names: Iterable[str], windows: Sequence[Windows]) -> list[str]:
    """The names, and each cache in each of these windows; 16 bits need none."""
    found = []
    for name in names:
        found.append(name)
        if cache_of(name) in BASELINES or not _codes(cache_of(name)):
            continue
        found += [_in_window(name, own) for own in windows if windows_of(name) != own]
    return list(dict.fromkeys(found))


def _in_window(name: str, windows: Windows) -> str:
    """A cache with other windows, which it holds in as many bits as its own."""
    cache, *overrides = method_of(name).split(",")
    if not sum(windows) and parse_spec(cache_of(name)).window_bits < 16:  # of no windows
        overrides = [each for each in overrides if not each.startswith("window_bits=")]
        overrides.append("window_bits=16")
    return ",".join([cache, f"sink={windows[0]}", f"recent={windows[1]}", *overrides])


def read_windows(text: str) -> list[Windows]:
    """Pairs of windows, as in ``none,64+64,64+256``."""
    try:
        return [_read_pair(part.strip()) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"windows={text}: none, or tokens at the beginning and at the end such as 64+256, "
            "with commas between"
        ) from None


def _read_pair(text: str) -> Windows:
    sink, recent = (0, 0) if text == "none" else map(int, text.split("+"))
    return sink, recent


def written_windows(windows: Windows) -> str:
    """As `read_windows` takes them, with room around the sign."""
    return "{} + {}".format(*windows) if sum(windows) else "none"


def _codes(cache: str) -> bool:
    return any(side.codec != "float" for side in parse_spec(cache).sides)


def _without(name: str, starts: tuple[str, ...]) -> str:
    first, *overrides = name.split(",")
    return ",".join([first, *(each for each in overrides if not each.startswith(starts))])
