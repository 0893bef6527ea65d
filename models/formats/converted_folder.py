"""Checkpoints that `jkvq convert` writes: Orbax arrays, our config, the tokenizer's files.

Nothing is decoded or renamed on loading, which is what makes them quick to load.
"""

import dataclasses
import json
from pathlib import Path

import jax

from jkvq.models.config import ModelConfig, config_from_fields
from jkvq.models.decoder import Params, abstract_params
from jkvq.models.dtype import require_range
from jkvq.models.tokenizer import Tokenizer, tokenizer_from_folder
from jkvq.support.atomic import array_errors, drafted, require_vacant
from jkvq.support.errors import UserError
from jkvq.support.progress import spinner

MANIFEST = "jkvq.json"
_FORMAT = 2


class ConvertedFolder:
    """A folder with jkvq.json, params/ and tokenizer/."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            form, self.config = manifest["format"], config_from_fields(manifest["config"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{folder / MANIFEST} is damaged ({error}); convert again") from None
        if form != _FORMAT:
            raise UserError(
                f"{folder} is of format {form}, which another version of jkvq wrote, and this one "
                f"reads {_FORMAT}; convert again"
            )

    def params(self, dtype) -> Params:
        import orbax.checkpoint as ocp  # noqa: PLC0415 (takes a second)

        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract_params(self.config, dtype),
        )
        restore = ocp.args.PyTreeRestore(
            item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
        )
        try:
            with spinner("Loading weights"), ocp.Checkpointer(_handler()) as checkpointer:
                params = checkpointer.restore(_params(self.folder), args=restore)
        except Exception as error:  # Orbax and tensorstore raise many kinds
            reason = str(error.__cause__ or error).strip().splitlines()[0][:200]
            raise UserError(f"{self.folder} is damaged ({reason}); convert again") from None
        return require_range(params, dtype)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_folder(self.folder / "tokenizer")


def write_converted(folder: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer):
    """Writes a checkpoint whole or not at all; ``folder`` must not exist or be empty."""
    import orbax.checkpoint as ocp  # noqa: PLC0415 (takes a second)

    require_vacant(folder)
    needs = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    with drafted(folder, needs=needs) as draft:
        with array_errors(), ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save(_params(draft), args=ocp.args.PyTreeSave(params))
        tokenizer.save(draft / "tokenizer")
        manifest = {"format": _FORMAT, "config": dataclasses.asdict(config)}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _params(folder: Path) -> Path:
    return folder.absolute() / "params"


def _handler():
    import orbax.checkpoint as ocp  # noqa: PLC0415 (takes a second)

    # Weights hardly compress; without compression a restore runs at the speed of the disk.
    return ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
