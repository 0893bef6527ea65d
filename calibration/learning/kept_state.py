"""How far a run has come, in a file: what was killed goes on from there."""

import contextlib
import os
from pathlib import Path
from typing import Any

import jax
from flax import serialization

from jkvq.support.progress import note


def keep(place: Path, identity: str, state: Any) -> None:
    """Writes a state, whole or not at all."""
    draft = place.with_name(f"{place.name}.draft")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        written = {"identity": identity, "state": jax.device_get(state)}
        draft.write_bytes(serialization.to_bytes(written))
        os.replace(draft, place)
    except OSError as error:
        note(f"How far it is cannot be kept: {error.strerror}; if it is killed, it begins anew")


def kept(place: Path, identity: str, like: Any) -> Any | None:
    """The state that a run of this identity has left; None if there is none that can be read."""
    try:
        found: Any = serialization.msgpack_restore(place.read_bytes())
        if found["identity"] != identity:
            return None
        return serialization.from_state_dict(like, found["state"])
    except (OSError, ValueError, KeyError, TypeError):  # no file, or not one of these
        return None


def forget(place: Path) -> None:
    """Removes what a run has left."""
    with contextlib.suppress(OSError):
        place.unlink()
