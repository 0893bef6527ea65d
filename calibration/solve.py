"""What each method makes of the moments of a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
from jkvq.cache.fixed_rotations import hadamard
from jkvq.calibration import rotations
from jkvq.calibration.allocation import SCORES, allocations
from jkvq.calibration.centroids import kmeans
from jkvq.calibration.moments import Captured, Moments
from jkvq.calibration.observe import WINDOW
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.support.arguments import INT32, flag, number, refusal, whole
from jkvq.support.errors import UserError, nearest
from jkvq.support.progress import count_bar

METHODS = {
    "jkvq": "means and balanced rotations of keys and values: for jkvq-*",
    "oscar": "OSCAR's rotations of keys and values, and clip ratios if asked for: for oscar-*",
    "hessian": "SAW-INT4's Hessian rotation of keys: for hessian-int4",
    "kmeans": "k-means centroids of keys and of values: for kmeans*",
    "blockgtq": "widths of the keys' rotary blocks: for blockgtq-*",
    "center": "means alone: for any cache with center=true",
}
_LITTLE = 1e-3  # the part of all tokens that counts for those past windows
_DAMPING, _PACKED_DAMPING = 1e-3, 3e-2  # of moments of all tokens, and of those past windows
KEY_TARGETS = ("q", "sq", "k")
VALUE_TARGETS = ("output", "weighted", "v")


@dataclass(frozen=True)
class CalibrationOptions:
    """How a method calibrates; the defaults are what the presets want.

    shared: one rotation for all KV heads of a layer, as OSCAR's published artefacts have.
    key_target, value_target: of method oscar, the second moment whose eigenvectors a rotation
        takes: of the queries ("q"), of the queries as the keys receive them ("sq") or of the keys
        ("k"); of the attention output ("output"), of the values weighted by their scores
        ("weighted") or alone ("v").
    without: factors of OSCAR's rotation to leave out: eigenvectors, hadamard, bit-reversal.
    order: of the block Hadamard behind the Hessian rotation; None is the largest up to 128.
    centroids, starts: of k-means.
    seed: of k-means, and of the order of windows in learning.
    score: by which rotary blocks get their bits.
    clip_for: a cache whose clip ratios are chosen for each layer.
    learn_for: a cache that the balanced rotations and the means are then learned for.
    steps, batch, rate: of learning: how many steps, windows in each, and Adam's greatest rate.
    window: tokens that see each other; a text is cut into such windows.
    context: the length of the sequences to serve; None is the model's context.
    """

    shared: bool = False
    key_target: str = "q"
    value_target: str = "output"
    without: tuple[str, ...] = ()
    order: int | None = None
    centroids: int = 256
    starts: int = 3
    seed: int = 0
    score: str = "qk_avg"
    clip_for: str | None = None
    learn_for: str | None = None
    steps: int = 800
    batch: int = 8
    rate: float = 0.02
    window: int = WINDOW
    context: int | None = None

    def __post_init__(self):
        def one_of(name: str, value: str, known):
            if not isinstance(value, str) or value not in known:
                raise UserError(f"{name}={value} is not known: {nearest(str(value), known)}")

        one_of("key_target", self.key_target, KEY_TARGETS)
        one_of("value_target", self.value_target, VALUE_TARGETS)
        one_of("score", self.score, SCORES)
        if isinstance(self.without, str) or not isinstance(self.without, Sequence):
            raise refusal("without", self.without, f"a list of {', '.join(rotations.FACTORS)}")
        object.__setattr__(self, "without", tuple(self.without))
        for factor in self.without:
            one_of("without", factor, rotations.FACTORS)
        for name, cache in (("clip_for", "oscar-int2"), ("learn_for", "jkvq-int2")):
            if not isinstance(getattr(self, name), str | None):
                raise refusal(name, getattr(self, name), f"a cache's name, such as {cache}")
        rate = number("rate", self.rate, 1e-6, 1.0, "allowed: numbers from 0.000001 to 1")
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "shared", flag("shared", self.shared))
        for name, least, most in _RANGES:
            given = getattr(self, name)
            if given is not None:
                allowed = f"allowed: whole numbers from {least} to {most}"
                object.__setattr__(self, name, whole(name, given, least, most, allowed))


_RANGES = (
    ("order", 1, 2**16),
    ("centroids", 1, 65536),
    ("starts", 1, 100),
    ("seed", 0, INT32),
    ("steps", 1, 10**6),
    ("batch", 1, 4096),
    ("window", 64, 2**20),
    ("context", 64, 2**24),
)
LEARNING = ("steps", "batch", "rate")
# Options that only these methods look at; the others hold for all.
OPTIONS_OF = {
    ("jkvq", "oscar"): ("shared", "clip_for"),
    ("oscar",): ("key_target", "value_target", "without"),
    ("hessian",): ("order",),
    ("kmeans",): ("centroids", "starts"),
    ("kmeans", "jkvq"): ("seed",),
    ("jkvq",): ("learn_for", *LEARNING),
    ("blockgtq",): ("score",),
}


def read_options(method: str, given: Mapping[str, Any]) -> CalibrationOptions:
    """The options of a method; refuses unknown ones, and those that it would not look at."""
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"method '{method}' is not known: {nearest(str(method), METHODS)}")
    names = [field.name for field in fields(CalibrationOptions)]
    for name in given:
        if name not in names:
            raise UserError(f"calibrate has no option '{name}': {nearest(name, names)}")
    for methods, options in OPTIONS_OF.items():
        for name in options:
            if name in given and method not in methods:
                raise UserError(
                    f"{name}={given[name]}: only with method {' or '.join(methods)}, and the "
                    f"method is {method}; leave it out"
                )
    for name in LEARNING:
        if name in given and given.get("learn_for") is None:
            raise UserError(f"{name}={given[name]}: only where something is learned; leave it out")
    return CalibrationOptions(**given)


@dataclass(frozen=True)
class Spectra:
    """What is drawn of one side: eigenvalues of its rotation's target, energy of its channels."""

    eigenvalues: Float[np.ndarray, "L K H"] | None = None
    energy_before: Float[np.ndarray, "L K H"] | None = None
    energy_after: Float[np.ndarray, "L K H"] | None = None


@dataclass(frozen=True)
class Solution:
    """A calibration with what there is to see of it."""

    calibration: Calibration
    key: Spectra = field(default_factory=Spectra)
    value: Spectra = field(default_factory=Spectra)


def method_label(method: str, options: CalibrationOptions) -> str:
    """The method, with its number of centroids if it has them."""
    return f"kmeans{options.centroids}" if method == "kmeans" else method


def check_method(
    method: str, options: CalibrationOptions, config: ModelConfig, tokens: int
) -> None:
    """Refuses what cannot be calibrated of this model."""
    head_dim = config.head_dim
    if config.latent is not None:
        raise UserError(
            "this model keeps latents (MLA), and there is no calibration of those; use a cache "
            "that takes none: bf16, int8, int4, saw-int4 or int2"
        )
    if tokens < head_dim:
        raise UserError(
            f"tokens={tokens}: at least {head_dim} are needed, as many as a head has channels, "
            "and some thousands are good"
        )
    if method in ("jkvq", "oscar") and head_dim.bit_count() != 1:
        raise UserError(
            f"head_dim={head_dim}: method {method} needs a power of two; use method center with "
            "saw-int4,center=true,recent=64,sink=64"
        )
    if options.context is not None and options.context > config.context:
        raise UserError(
            f"context={options.context}: give at most the model's, which is {config.context}"
        )
    if options.order is not None and head_dim % options.order:
        raise UserError(f"order={options.order}: it must divide the {head_dim} channels of a head")
    if method == "kmeans" and tokens < options.centroids:
        raise UserError(
            f"centroids={options.centroids}: at least as many tokens are needed, and tokens is "
            f"{tokens}"
        )


def solve(
    method: str,
    options: CalibrationOptions,
    moments: Moments,
    captured: Captured | None,
    projected: Float[np.ndarray, "L K H H"],
) -> Solution:
    """The parts that a method's caches need; the means are in all of them.

    ``projected`` is what the output projections read of values (``output_projections``).
    """
    label = method_label(method, options)
    if method == "jkvq":
        return _balanced(label, options, moments, projected)
    if method == "oscar":
        return _rotated(label, options, moments)
    key, value = _centred(moments)
    spectra = Spectra()
    if method == "hessian":
        H = moments.qq.shape[-1]
        R = rotations.hessian(moments.qq, options.order or min(128, H & -H))
        key = _rotated_by(key, R)
        spectra = _spectra(rotations.eigen(rotations.shared(moments.qq)).values, moments.kk, R)
    elif method == "kmeans":
        assert captured is not None
        key = replace(key, centroids=_centroids("key", captured.key, options))
        value = replace(value, centroids=_centroids("value", captured.value, options))
    elif method == "blockgtq":
        score = SCORES[options.score](moments.q_energy, moments.k_energy)
        key = replace(key, widths=allocations(score))
    return Solution(Calibration(key, value, label), key=spectra)


def output_projections(config: ModelConfig, params: Params) -> Float[np.ndarray, "L K H H"]:
    """W_o^T W_o of the channels of each KV head, summed over the query heads that read it."""
    found = []
    for layer in range(config.layers):
        weight = np.asarray(params["layers"][layer]["attention"]["o"]["weight"], np.float32)
        heads = weight.reshape(len(weight), config.kv_heads, -1, config.head_dim)
        found.append(np.einsum("dkgh,dkgi->khi", heads, heads, optimize=True))
    return np.stack(found).astype(np.float64)


def _centred(moments: Moments) -> tuple[SideCalibration, SideCalibration]:
    """The means of keys and of values: weighted by all scores, and plain for use past windows."""
    key = moments.read.k_mean, moments.k_mean_in_page
    value = moments.read.v_mean, moments.v_mean
    return tuple(
        SideCalibration(*(Transform(_float32(mean)) for mean in means)) for means in (key, value)
    )


def _balanced(label, options: CalibrationOptions, moments: Moments, projected) -> Solution:
    """Balanced rotations: of all tokens, and of those that queries read past windows.

    The latter are few, and differ from text to text: they are damped more, and centred plainly.
    """
    # Texts that are shorter than the windows have none of these: then they are as all tokens.
    packed = jax.tree.map(lambda a, b: a + _LITTLE * b, moments.packed, moments.read)
    key, value = _centred(moments)

    def balance(transform: Transform, stored, reading, damping: float):
        moved = (rotations.shared(x) if options.shared else x for x in (stored, reading))
        M, spread = rotations.balanced(*moved, damping)
        found = replace(transform, rotation=_float32(M), spread=_float32(spread))
        return found, _spectra(spread, stored, M @ hadamard(M.shape[-1]))

    def balance_side(side: SideCalibration, of_all, of_packed) -> tuple[SideCalibration, Spectra]:
        every, spectra = balance(side.all_tokens, *of_all, _DAMPING)
        past, _ = balance(side.past_windows, *of_packed, _PACKED_DAMPING)
        return replace(side, all_tokens=every, past_windows=past), spectra

    reads = moments.read, packed
    key, key_spectra = balance_side(key, *((read.k_covariance, read.qq) for read in reads))
    value, value_spectra = balance_side(value, *((read.v_covariance, projected) for read in reads))
    return Solution(Calibration(key, value, label), key_spectra, value_spectra)


def _rotated(label, options: CalibrationOptions, moments: Moments) -> Solution:
    """OSCAR's rotations."""
    kk, vv = moments.kk, moments.vv
    targets = {
        "key": {"q": moments.qq, "sq": moments.sq, "k": kk}[options.key_target],
        "value": {"output": moments.output, "weighted": moments.read.vv[..., :-1, :-1], "v": vv}[
            options.value_target
        ],
    }
    sides, spectra = dict(zip(targets, _centred(moments), strict=True)), {}
    for name, second in targets.items():
        target = rotations.shared(second) if options.shared else second
        R = rotations.oscar(target, options.without)
        sides[name] = _rotated_by(sides[name], R)
        spectra[name] = _spectra(rotations.eigen(target).values, kk if name == "key" else vv, R)
    return Solution(Calibration(**sides, method=label), **spectra)


def _rotated_by(side: SideCalibration, R) -> SideCalibration:
    """With one rotation for every cache."""
    return replace(side, all_tokens=replace(side.all_tokens, rotation=_float32(R)))


def _spectra(eigenvalues, stored, R) -> Spectra:
    rotated = np.einsum("...hi,...hj,...ji->...i", R, stored, R, optimize=True)
    return Spectra(
        _float32(eigenvalues),
        _float32(np.diagonal(stored, axis1=-2, axis2=-1)),
        _float32(rotated),
    )


def _centroids(name: str, tokens: np.ndarray, options: CalibrationOptions) -> np.ndarray:
    L, T, K, H = tokens.shape
    found = []
    with count_bar(f"Clustering {name}s", L) as bar:
        for layer in tokens:
            flat = jnp.asarray(layer.reshape(T, K * H))
            found.append(
                np.asarray(
                    kmeans(flat, options.centroids, seed=options.seed, starts=options.starts)
                )
            )
            bar.advance(1)
    return np.stack(found).reshape(L, options.centroids, K, H)


def _float32(x) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)
