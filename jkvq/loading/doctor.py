"""What this machine is, what jkvq would do on it, and what is wrong.

Nothing is imported before it is looked at: a JAX that cannot be imported is a line of the report.
"""

import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

from jkvq.defaults import DEFAULT_CACHES, DEFAULT_MODEL
from jkvq.support.memory import format_bytes, free_bytes, host_free_bytes
from jkvq.support.user_cache import cache_folder
from jkvq.version import VERSION

_NEEDED = ("jax", "jaxlib", "flax", "numpy", "transformers")
# Where JAX runs on NVIDIA's GPUs; names end in the version of CUDA they are for, or do not.
_CUDA = (
    *(f"jax-cuda{major}-plugin" for major in (12, 13)),
    *("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_VARIABLES = ("JKVQ_", "JAX_", "XLA_", "CUDA_VISIBLE_DEVICES")
_INSTALL = "install jkvq again with `pip install --upgrade jkvq`"
_MEND = f"{_INSTALL}; where a device is at fault, JAX_PLATFORMS=cpu does without it"
_INSTALL_CUDA = "install JAX for it with `pip install 'jkvq[cuda12]'` (or cuda13)"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``advice`` says what to do about it, and is None if all is well."""

    section: str
    name: str
    value: str
    advice: str | None = None


class Line(NamedTuple):
    """A finding of a section."""

    name: str
    value: str
    advice: str | None = None


Lines = Iterator[Line]


def diagnose() -> list[Finding]:
    """Looks at everything; whatever fails is a finding too."""
    sections: dict[str, Callable[[], Lines]] = {
        "versions": _versions,
        "environment": _environment,
        "machine": _machine,
        "folders": _folders,
        "devices": _devices,
        "jkvq generate": _choices,
    }
    found = []
    for section, look in sections.items():
        try:
            for line in look():
                found.append(Finding(section, *line))
        except Exception as error:  # that is what is to be found out
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            found.append(Finding(section, "failed", f"{type(error).__name__}: {said}", _MEND))
    return found


def _versions() -> Lines:
    yield Line("jkvq", VERSION)
    yield Line("python", platform.python_version())
    for name in _NEEDED:
        found = _version(name)
        yield Line(name, found or "not installed", None if found else _INSTALL)
    for name in _CUDA:
        found = _version(name)
        if found is not None:
            fits = not name.startswith("jax-") or found == _version("jaxlib")
            yield Line(name, found, None if fits else f"it is not jaxlib's: {_INSTALL_CUDA}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _environment() -> Lines:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            fast = name != "JAX_DISABLE_JIT" or value.lower() in ("", "0", "false")
            yield Line(name, value, None if fast else "nothing is compiled then: unset it")


def _machine() -> Lines:
    yield Line("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Linux: those that this process may use
        cores = len(os.sched_getaffinity(0))
    yield Line("cores", str(cores))
    free = host_free_bytes()
    yield Line("free memory", "not known" if free is None else format_bytes(free))
    if hasattr(os, "sysconf"):
        pages, each = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        yield Line("memory", format_bytes(pages * each))


def _folders() -> Lines:
    cache = cache_folder()
    yield _folder("cache", cache, "let $JKVQ_CACHE name a folder that can be written")
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    compiled = Path(chosen) if chosen else cache / "compiled"
    yield _folder("compiled programs", compiled, "every start compiles anew until it can be")


def _folder(name: str, folder: Path, advice: str) -> Line:
    """Whether a folder can be written, or made."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            return Line(name, f"{folder}, {format_bytes(disk_usage(there).free)} free")
    except OSError as error:
        return Line(name, f"{folder} cannot be written: {error.strerror}", advice)


def _devices() -> Lines:
    cards = list(_cards())
    yield from cards
    # A look at a GPU shall not take its memory from those who use it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax  # noqa: PLC0415 (may fail)

    for device in jax.devices():
        yield _device(device, cards)
    from jkvq.attention.implementation import device_limit  # noqa: PLC0415 (as jax)

    yield Line("GPU kernels", device_limit() or "serve here")


def _device(device, cards: list[Line]) -> Line:
    """A device as JAX sees it."""
    said, stats = [device.device_kind], device.memory_stats()
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        limit = format_bytes(stats["bytes_limit"])
        said.append(f"{format_bytes(free)} of JAX's {limit} free")
    if device.platform == "gpu":
        said.append(f"compute capability {device.compute_capability}")
        said.append(device.client.platform_version.replace("\n", ", "))  # with CUDA's version
    advice = None
    if cards and device.platform == "cpu":
        hidden = os.environ.get("JAX_PLATFORMS", "")
        advice = f"JAX does not use the GPU: {_INSTALL_CUDA}"
        if "cpu" in hidden:
            advice = f"JAX_PLATFORMS={hidden} keeps JAX from the GPU: unset it"
    return Line(f"JAX {device.platform}:{device.id}", ", ".join(said), advice)


def _cards() -> Lines:
    """NVIDIA's GPUs, as their driver sees them."""
    asked = "name,memory.free,memory.total,compute_cap,driver_version"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except FileNotFoundError:  # no driver, and so no such GPU
        return
    except subprocess.TimeoutExpired:
        said = None
    if said is None or said.returncode:
        answer = "no answer" if said is None else said.stdout.strip().partition("\n")[0]
        yield Line("NVIDIA driver", answer, "it is not well: see what `nvidia-smi` says")
        return
    for index, line in enumerate(said.stdout.strip().splitlines()):
        name, free, total, capability, driver = (part.strip() for part in line.split(","))
        value = f"{name}, compute capability {capability}, driver {driver}"
        advice = None
        if free.isdigit() and total.isdigit():  # "[N/A]" where it is the host's
            sizes = (format_bytes(int(x) * 2**20) for x in (free, total))
            value = f"{value}, {' of '.join(sizes)} free"
            if int(free) < int(total) / 2:
                advice = "others use most of its memory: `nvidia-smi` shows them"
        yield Line(f"GPU {index}", value, advice)


def _choices() -> Lines:
    """What `jkvq generate` would take if it were told nothing."""
    # Each brings jax, which may fail.
    from jkvq.attention.implementation import choose_implementation, device_limit  # noqa: PLC0415
    from jkvq.cache.specs.spec_text import spec_text  # noqa: PLC0415
    from jkvq.loading.load import default_cache  # noqa: PLC0415
    from jkvq.models.decoder import weight_bytes  # noqa: PLC0415
    from jkvq.models.dtype import compute_dtype  # noqa: PLC0415
    from jkvq.models.formats.catalog import CATALOG, cached_file, has_its_size  # noqa: PLC0415
    from jkvq.models.formats.checkpoint import open_checkpoint  # noqa: PLC0415

    dtype = compute_dtype(None)
    yield Line("dtype", dtype.__name__)
    if not has_its_size(DEFAULT_MODEL):
        size = format_bytes(CATALOG[DEFAULT_MODEL].bytes)
        yield Line("model", f"{DEFAULT_MODEL}, to be fetched ({size})")
        yield Line("cache", DEFAULT_CACHES[0])
        yield Line("implementation", "reference" if device_limit() else "pallas")
        return
    config = open_checkpoint(cached_file(DEFAULT_MODEL)).config
    weights, free = weight_bytes(config, dtype), free_bytes()
    fits = free is None or weights < free
    advice = None if fits else "less memory is free: end other programs that use it"
    yield Line("model", f"{DEFAULT_MODEL}, {format_bytes(weights)} of weights", advice)
    spec, reason = default_cache(config)
    yield Line("cache", spec_text(spec) if reason is None else f"{spec_text(spec)}: {reason}")
    yield Line("implementation", choose_implementation(None, config, spec))
