"""Writing a model as a checkpoint of our own."""

import time
from pathlib import Path

from jkvq.models.dtype import compute_dtype
from jkvq.models.formats.checkpoint import open_checkpoint
from jkvq.models.formats.converted_folder import write_converted
from jkvq.support.atomic import require_vacant
from jkvq.support.progress import spinner


def convert(model: str | Path, out: Path, *, dtype: str | None = None) -> tuple[float, int]:
    """Writes ``model`` to the new folder ``out``; returns the seconds it took and the bytes."""
    start, compute = time.perf_counter(), compute_dtype(dtype)
    require_vacant(out)
    checkpoint = open_checkpoint(model)
    tokenizer, params = checkpoint.tokenizer(), checkpoint.params(compute)
    with spinner(f"Writing {out}"):
        write_converted(out, checkpoint.config, params, tokenizer)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return time.perf_counter() - start, size
