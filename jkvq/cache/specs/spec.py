"""How keys and values are stored: every method is a value of one frozen dataclass, `CacheSpec`.

Methods with a name are in presets.py, how users write them is in spec_text.py.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jkvq.cache.specs.page_rule import PageRule, in_whole_pages
from jkvq.pallas_kernels.formats.digits import MAX_BITS, PARTS
from jkvq.pallas_kernels.formats.packing import packed_words
from jkvq.support.errors import UserError

_METHODS = {"balanced": "jkvq", "oscar": "oscar", "hessian": "hessian"}  # that make a rotation
CALIBRATED_ROTATIONS = tuple(_METHODS)
ROTATIONS = (
    *("none", "bdr16", "bdr32", "bdr64", "bdr128", "saw", "hadamard", "random"),
    *CALIBRATED_ROTATIONS,
)
_BITS = {"float": (16, 32), "affine": (2, 3, 4, 8), "lloyd": (1, 2, 3, 4, 5, 6, 7, 8)}


@dataclass(frozen=True)
class SideSpec:
    """How one side of the cache, keys or values, is stored.

    A head's vector is centred, rotated, clipped and coded, in this order; all of it is optional.

    bits: of each code. With the codec "float", 16 is bfloat16 and 32 is float32.
    codec: "float" stores numbers as they are; "affine" stores lo + scale * code for each group of
        channels; "lloyd" stores a head's norm and the nearest Lloyd-Max level of each channel.
    group: channels that share a scale and lo; None is the whole head.
    center: subtract the mean that calibration found. Keys have it after RoPE: their mean is turned
        by RoPE to the middle of the page that they are stored in.
    rotation: the matrix that a head's channels are multiplied by. "bdr16" to "bdr128" are block
        Hadamard matrices of that order, "saw" that of the largest order up to 128, "hadamard" that
        of the whole head, "random" a seeded orthogonal one. "oscar", "hessian" and "balanced" come
        from calibration; "balanced" is not orthogonal: it also scales directions, and queries (or
        the output projection, for values) are multiplied by its inverse transpose.
    clip: clamp magnitudes above this quantile of the head's; 1 is off.
    step: "min-max" takes the scale from the least and greatest value of a group (codec "lloyd":
        from the norm); "fitted" takes it by least squares, stretched so that coding does not
        shorten the vector.
    centroids: code the difference to the nearest of so many k-means centroids; 0 is off.
    allocation: "uniform" widths, or more bits for the rotary "blocks" that matter more.
    digits: how many codes each quarter of the channels gets, the strongest quarter first. With
        (2, 1, 1, 0) the first quarter is coded in twice the bits and the last is not stored. ()
        is one code for every channel.
    """

    bits: int
    codec: Literal["float", "affine", "lloyd"] = "affine"
    group: int | None = None
    center: bool = False
    rotation: str = "none"
    clip: float = 1.0
    step: Literal["min-max", "fitted"] = "min-max"
    centroids: int = 0
    allocation: Literal["uniform", "blocks"] = "uniform"
    digits: tuple[int, ...] = ()

    def __post_init__(self):
        def require(good: bool, name: str, allowed: object):
            if not good:
                raise UserError(f"{name}={getattr(self, name)}: allowed: {allowed}")

        require(self.codec in _BITS, "codec", ", ".join(_BITS))
        allowed = ", ".join(map(str, _BITS[self.codec]))
        require(self.bits in _BITS[self.codec], "bits", f"{allowed} for codec {self.codec}")
        require(self.rotation in ROTATIONS, "rotation", ", ".join(ROTATIONS))
        require(0.5 <= self.clip <= 1, "clip", "0.5 to 1 (off)")
        require(self.group is None or self.group >= 32, "group", "32 or more, or none")
        require(self.step in ("min-max", "fitted"), "step", "min-max, fitted")
        require(0 <= self.centroids <= 65536, "centroids", "0 (off) to 65536")
        require(self.allocation in ("uniform", "blocks"), "allocation", "uniform, blocks")
        affine = self.codec == "affine"
        require(affine or self.group is None, "group", "only with codec affine")
        require(affine or self.clip == 1, "clip", "only with codec affine")
        coded = self.codec != "float"
        require(coded or self.step == "min-max", "step", "only with codec affine or lloyd")
        require(affine or self.centroids == 0, "centroids", "only with codec affine")
        held = self.center and self.centroids > 0
        require(not held, "center", "false with centroids, which hold the mean")
        blocks = self.allocation == "blocks"
        require(self.codec == "lloyd" or not blocks, "allocation", "blocks only with codec lloyd")
        require(not blocks or self.rotation == "random", "rotation", "random with blocks")
        if self.digits:
            whole = len(self.digits) == sum(self.digits) == PARTS and min(self.digits) >= 0
            require(whole, "digits", f"{PARTS} numbers that add up to {PARTS}, such as 2+1+1+0")
            fit = self.bits * max(self.digits) <= MAX_BITS
            require(fit, "digits", f"up to {MAX_BITS} bits in all; or digits=none")
            kind = affine and self.step == "fitted" and self.rotation == "balanced"
            plain = self.group is None and self.clip == 1 and self.centroids == 0
            allowed = "rotation=balanced and step=fitted, without group, clip and centroids"
            require(kind and plain, "digits", f"only with {allowed}; or digits=none")

    @property
    def calibrated(self) -> bool:
        """Whether it needs something of the model that only a calibration finds."""
        return self.center or bool(self.methods)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of calibration that find what it needs, but for means, which most find.

        "kmeans" is followed by its number of centroids.
        """
        found = (
            f"kmeans{self.centroids}" if self.centroids else None,
            "blockgtq" if self.allocation == "blocks" else None,
            _METHODS.get(self.rotation),
        )
        return tuple(method for method in found if method)


EXACT = SideSpec(bits=16, codec="float")
_WINDOW_BITS = (8, 16)


@dataclass(frozen=True)
class OtherLayers:
    """Layers whose keys and values are coded otherwise than those of the rest."""

    layers: tuple[int, ...]
    key: SideSpec
    value: SideSpec


@dataclass(frozen=True)
class CacheSpec(PageRule):
    """How a KV cache is stored.

    sink, recent: how many of a sequence's first and latest tokens stay in its windows, in 16 bits;
        rounded up to whole pages. Tokens between them are packed, stored as codes, a whole page at
        a time: up to a page less one token more than ``recent`` stay there.
    window_bits: 16, or 8: windows then hold affine codes of that width, in half the memory. Where
        pages hold floats, windows do as well.
    page: tokens per page, a power of two. Pages are the unit in which memory is handed out.
    exact_layers: layers whose keys and values all stay in 16 bits.
    other_layers: layers with codes of their own; windows and pages are those of all.
    """

    key: SideSpec
    value: SideSpec
    sink: int = 0
    recent: int = 0
    window_bits: int = 16
    page: int = 64
    exact_layers: tuple[int, ...] = ()
    other_layers: tuple[OtherLayers, ...] = ()

    def __post_init__(self):
        if not (8 <= self.page <= 1024 and self.page.bit_count() == 1):
            raise UserError(
                f"page={self.page}: tokens per page, a power of two from 8 to 1024; 64 is usual"
            )
        if self.sink < 0 or self.recent < 0 or (self.sink > 0 and self.recent == 0):
            raise UserError(f"sink={self.sink}, recent={self.recent}: both 0, or recent at least 1")
        for name in ("sink", "recent"):
            object.__setattr__(self, name, in_whole_pages(getattr(self, name), self.page))
        if self.window_bits not in _WINDOW_BITS:
            raise UserError(f"window_bits={self.window_bits}: allowed: 8, 16")
        codes = any(side.codec != "float" for side in self.sides)
        if self.window_bits < 16 and not (codes and self.windowed):
            raise UserError(
                f"window_bits={self.window_bits}: only of windows (recent=64, say) behind which "
                "tokens are stored as codes; otherwise window_bits=16"
            )
        for value in (self.value, *(other.value for other in self.other_layers)):
            if value.allocation == "blocks":
                raise UserError("value.allocation=blocks: only keys have rotary blocks")
            if value.digits:
                raise UserError("value.digits: values have one each; give key.digits alone")
            if value.rotation == "hessian":
                raise UserError("value.rotation=hessian: it is found for keys alone")
        if len(self.methods) > 1:
            raise UserError(
                f"this cache needs calibrations of methods {' and '.join(self.methods)}, and "
                "takes one: give keys and values, of all layers, what one of them finds"
            )
        named = [*self.exact_layers, *(n for other in self.other_layers for n in other.layers)]
        if twice := sorted({n for n in named if named.count(n) > 1}):
            raise UserError(f"layer {twice[0]} is exact and has codes of its own: give one of both")

    def of_layer(self, layer: int) -> "CacheSpec":
        """The spec of one layer."""
        if layer in self.exact_layers:
            return CacheSpec(EXACT, EXACT, page=self.page)
        own = next((other for other in self.other_layers if layer in other.layers), self)
        return dataclasses.replace(
            self, key=own.key, value=own.value, exact_layers=(), other_layers=()
        )

    @property
    def sides(self) -> tuple[SideSpec, ...]:
        """How keys and values are stored in layers that are not exact, each way once."""
        both = ((own.key, own.value) for own in (self, *self.other_layers))
        return tuple(dict.fromkeys(side for sides in both for side in sides))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of calibration that its sides need."""
        return tuple(dict.fromkeys(method for side in self.sides for method in side.methods))

    @property
    def window_sides(self) -> tuple[SideSpec, SideSpec]:
        """How windows hold keys and values."""

        def held(side: SideSpec) -> SideSpec:
            if side.codec == "float":
                return side
            return EXACT if self.window_bits == 16 else SideSpec(self.window_bits)

        return held(self.key), held(self.value)

    def check(self, layers: int, head_dim: int, context: int, latent: int | None = None) -> None:
        """Refuses a spec that a model of these sizes cannot have; ``latent`` as in `CacheShape`."""
        if self.sink + self.recent > context:
            raise UserError(
                f"sink={self.sink}, recent={self.recent}: together at most the context of {context}"
            )
        for name, named in (("exact_layers=", self.exact_layers), *self._others()):
            for layer in named:
                if not 0 <= layer < layers:
                    raise UserError(f"{name}{layer}: this model has layers 0 to {layers - 1}")
        for own in (self, *self.other_layers):
            if latent is not None:
                _check_latent(own.key, own.value)
            for name, side in (("key", own.key), ("value", own.value)):
                _check_side(name, side, latent or head_dim if name == "value" else head_dim)

    def _others(self):
        return (("layer ", other.layers) for other in self.other_layers)


def _check_latent(key: SideSpec, value: SideSpec) -> None:
    """Latents are normed: no weights are there to fold a basis into, and none is calibrated."""
    wants = {
        "value.rotation": value.rotation != "none",
        "a calibration": key.calibrated or value.calibrated,
    }
    for what, wanted in wants.items():
        if wanted:
            raise UserError(
                f"this model keeps latents (MLA), and this cache has {what}, which they cannot "
                "have; use bf16, int8, int4, saw-int4, int3 or int2"
            )


def _check_side(name: str, side: SideSpec, head_dim: int) -> None:
    def refuse(what: str, use: str):
        raise UserError(f"head_dim={head_dim}: {name} {what}; use {use}")

    if side.rotation.startswith("bdr") and head_dim % int(side.rotation[3:]):
        refuse(f"rotation {side.rotation} needs a multiple of {side.rotation[3:]}", "rotation=saw")
    if side.rotation in ("hadamard", "balanced", "oscar") and head_dim.bit_count() != 1:
        refuse(f"rotation {side.rotation} needs a power of two", "rotation=none or saw")
    if head_dim % (side.group or head_dim):
        refuse(f"group {side.group} does not divide it", "a group that does")
    if side.codec != "float":
        try:
            packed_words(head_dim, side.bits)
        except ValueError as error:
            refuse(f"bits={side.bits}: {error}", f"{name}.bits=4")
