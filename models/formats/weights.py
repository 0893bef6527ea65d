"""Fills a decoder's parameters from a checkpoint, one tensor at a time."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, abstract_params
from jkvq.models.dtype import require_range
from jkvq.models.formats.channels import Path, in_decoder_order
from jkvq.models.joined import Part, joined_parts
from jkvq.support.errors import UserError
from jkvq.support.progress import byte_bar

_READERS = 2  # numpy decodes a tensor while the next one is read

# Our name of each parameter, without "layers.<i>." and the last "weight" or "bias".
Names = Mapping[str, str]


def load_params(
    config: ModelConfig,
    dtype,
    names: Names,
    read: Callable[[str], np.ndarray],
    *,
    interleaved: bool = False,
) -> Params:
    """Parameters on the device, in ``dtype``.

    Args:
        config: the architecture, which says what there must be.
        dtype: of every parameter.
        names: for each of our names the checkpoint's, with ``{layer}`` for the layer's number and
            ``{expert}`` for the expert's, where each has a tensor of its own.
        read: gives a tensor by the checkpoint's name, raising KeyError where there is none. Only
            two parameters at a time are held on the host.
        interleaved: whether the two channels of a rotary pair stand side by side.
    """
    abstract = abstract_params(config, dtype)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    with byte_bar("Loading weights", total) as bar:

        def read_parts(path: Path, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            parts = _parts(config, path, names)
            if parts[0][0] is None and "{expert}" not in source_name(path, names):
                return np.asarray(_read_one(read, source_name(path, names), leaf.shape), leaf.dtype)
            array = np.zeros(leaf.shape, leaf.dtype)
            for part, own in parts:
                target = array if part is None else part.of(str(path[-1]), array)
                name = source_name(own, names)
                if "{expert}" not in name:
                    target[...] = _read_one(read, name, target.shape)
                    continue
                for expert in range(len(target)):
                    own_name = name.format(expert=expert)
                    target[expert] = _read_one(read, own_name, target.shape[1:])
            return array

        def fill(place: tuple[Any, jax.ShapeDtypeStruct]) -> jax.Array:
            path, leaf = tuple(key.key for key in place[0]), place[1]
            with np.errstate(over="ignore"):  # refused below
                array = read_parts(path, leaf)
            array = in_decoder_order(config, path, array, interleaved=interleaved)
            bar.advance(array.nbytes)
            return jax.device_put(array)

        places, tree = jax.tree.flatten_with_path(abstract)
        with ThreadPoolExecutor(_READERS) as readers:
            return require_range(tree.unflatten(readers.map(fill, places)), dtype)


def _read_one(read: Callable[[str], np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The checkpoint's tensor of this name; refused if it is not there, or of another shape."""
    try:
        tensor = read(name)
    except KeyError:
        raise UserError(f"the checkpoint has no tensor '{name}'") from None
    if tensor.shape != shape:
        raise UserError(f"tensor '{name}' has shape {tensor.shape}; its config asks for {shape}")
    return tensor


def _parts(config: ModelConfig, path: Path, names: Names) -> list[tuple[Part | None, Path]]:
    """What a parameter is read from, and the paths that those have: itself, or those joined."""
    if path[0] != "layers":
        return [(None, path)]
    *inside, kind = path[2:]
    parts = joined_parts(config.layer(int(path[1]))).get(tuple(map(str, inside)), [])
    if not parts or ".".join(map(str, inside)) in names:
        return [(None, path)]
    return [
        (part, (*path[:-2], part.name, kind)) for part in parts if kind == "weight" or part.bias
    ]


def source_name(path: Path, names: Names) -> str:
    """The checkpoint's name of our parameter at ``path``; ``{expert}`` stays in it."""
    layer = ""
    if path[0] == "layers":
        layer, path = path[1], path[2:]
    *module, kind = path
    if kind == "embedding":
        return names["embedding"]
    whole = ".".join(map(str, path))
    if whole in names:  # a parameter that is neither weight nor bias
        return names[whole].replace("{layer}", str(layer))
    return names[".".join(map(str, module))].replace("{layer}", str(layer)) + f".{kind}"
