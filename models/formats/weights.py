"""Fills a decoder's parameters from a checkpoint, one tensor at a time."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, abstract_params
from jkvq.models.dtype import require_range
from jkvq.models.joined import Part, joined_parts
from jkvq.support.errors import UserError
from jkvq.support.progress import byte_bar

_READERS = 2  # numpy decodes a tensor while the next one is read

Path = tuple[str | int, ...]  # of a parameter
# Our name of each parameter, without "layers.<i>." and the last "weight" or "bias".
Names = Mapping[str, str]


def load_params(
    config: ModelConfig, dtype, names: Names, read: Callable[[str], np.ndarray]
) -> Params:
    """Parameters on the device, in ``dtype``.

    Args:
        config: the architecture, which says what there must be.
        dtype: of every parameter.
        names: for each of our names the checkpoint's, with ``{layer}`` for the layer's number.
        read: gives a tensor by the checkpoint's name, raising KeyError where there is none. Only
            two parameters at a time are held on the host.
    """
    abstract = abstract_params(config, dtype)
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    with byte_bar("Loading weights", total) as bar:

        def read_part(path: Path, shape: tuple[int, ...]) -> np.ndarray:
            name = source_name(path, names)
            try:
                tensor = read(name)
            except KeyError:
                raise UserError(f"the checkpoint has no tensor '{name}'") from None
            if tensor.shape != shape:
                raise UserError(
                    f"tensor '{name}' has shape {tensor.shape}; its config asks for {shape}"
                )
            return tensor

        def fill(place: tuple[Any, jax.ShapeDtypeStruct]) -> jax.Array:
            path, leaf = tuple(key.key for key in place[0]), place[1]
            with np.errstate(over="ignore"):  # refused below
                if parts := _parts(config, path):
                    array = np.zeros(leaf.shape, leaf.dtype)
                    for part, own in parts:
                        array[part.rows] = read_part(own, (part.count, *leaf.shape[1:]))
                else:
                    array = np.asarray(read_part(path, leaf.shape), leaf.dtype)
            bar.advance(array.nbytes)
            return jax.device_put(array)

        places, tree = jax.tree.flatten_with_path(abstract)
        with ThreadPoolExecutor(_READERS) as readers:
            return require_range(tree.unflatten(readers.map(fill, places)), dtype)


def _parts(config: ModelConfig, path: Path) -> list[tuple[Part, Path]]:
    """What a joined parameter is read from, and the paths that those would have alone."""
    *above, module, projection, kind = "", "", *path
    parts = joined_parts(config).get(str(module), {}).get(str(projection), [])
    return [
        (part, (*above[2:], module, part.name, kind))
        for part in parts
        if kind == "weight" or part.bias
    ]


def source_name(path: Path, names: Names) -> str:
    """The checkpoint's name of our parameter at ``path``."""
    layer = ""
    if path[0] == "layers":
        layer, path = path[1], path[2:]
    *module, kind = path
    if kind == "embedding":
        return names["embedding"]
    return f"{names['.'.join(map(str, module))].format(layer=layer)}.{kind}"
