"""From a model and a target to a cache whose layers have widths of their own."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jkvq.cache.footprint import bits_per_element, pool_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.kept_names import keep_name, require_free_name
from jkvq.cache.specs.presets import EVALUATED_ONLY, PRESETS
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import spec_text
from jkvq.calibration.artefact import Artefact, save_artefact
from jkvq.calibration.learning.cost import operations, require_time
from jkvq.calibration.learning.passes import first_that_reads_coded
from jkvq.calibration.learning.text import Text, cut
from jkvq.calibration.tuning.choose import candidates, fewest_bits, least_loss
from jkvq.calibration.tuning.sensitivity import losses_of_options, measured, sensitivities
from jkvq.calibration.tuning.widths import (
    WINDOWS,
    Pair,
    Window,
    cache_of,
    narrowest_alike,
    side_options,
)
from jkvq.defaults import CALIBRATION_TOKENS
from jkvq.evaluation.corpus import leading_tokens, text_tokens
from jkvq.llm import require_same_weights
from jkvq.loading.calibrate import Corpus, read_corpus
from jkvq.loading.kept_calibration import artefact_for, kept_calibration
from jkvq.loading.learn import balanced_artefact
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import weight_bytes
from jkvq.models.dtype import DTypeLike, compute_dtype
from jkvq.models.model import Model, load_model
from jkvq.support.arguments import INT32, number, whole
from jkvq.support.atomic import require_vacant
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes, parse_bytes
from jkvq.support.progress import count_bar, note, spinner

_BALANCED = PRESETS["jkvq-int2"].spec  # a cache that the same calibration serves
_READ = 2  # batches of windows that sensitivities are measured on
_BATCH = 4  # windows


@dataclass(frozen=True)
class Target:
    """What a cache is tuned to: one of the first three.

    bits: of an element as stored, at most, at ``context`` tokens.
    max_kl: of the next token's distribution from that of the 16-bit cache, in nats, at most.
    memory: bytes for the weights and the cache of ``batch`` sequences of ``context`` tokens.
    """

    bits: float | None
    max_kl: float | None
    memory: int | None
    context: int
    batch: int


@dataclass(frozen=True)
class _Limit:
    """What a cache may take at most, as it was given and as it is shown."""

    most: float
    size: Callable[[CacheSpec], float]
    given: str
    shown: Callable[[Any], str]


@dataclass(frozen=True)
class Tuned:
    """A cache that was tuned: its name, and what it has at the target's context.

    kl: as measured on windows that nothing was chosen by.
    """

    name: str
    spec: CacheSpec
    bits: float
    kl: float
    folder: Path

    @property
    def text(self) -> str:
        return spec_text(self.spec)


def tune(
    model: str | Path | Model,
    *,
    bits: float | None = None,
    max_kl: float | None = None,
    memory: str | None = None,
    context: int | None = None,
    batch: int = 1,
    text: str | Path | Corpus | None = None,
    window: int = 2048,
    calibration: str | Path | None = None,
    name: str = "tuned",
    out: str | Path | None = None,
    dtype: DTypeLike | None = "float32",
) -> Tuned:
    """Chooses bits of keys and values by layer, windows and exact layers, to a target.

    Args:
        model: a name, folder or file, or what `jkvq.load_model` returns.
        bits, max_kl, memory: the target, one of them (see `Target`).
        context: tokens of a sequence at which bits or memory are counted; None is the model's.
        batch: sequences that the memory is for.
        text: as for `calibrate`; its last windows are kept to measure the result.
        window: tokens that see each other.
        calibration: a folder of method jkvq; None is the one kept for the model.
        name: what the cache is called from now on, wherever caches are named.
        out: a new folder for the artefact; None takes the place of the one kept for the model.
        dtype: what it is measured in. What bfloat16 rounds would hide what wide codes cost.
    """
    require_free_name(name, (*PRESETS, *EVALUATED_ONLY))
    if sum(x is not None for x in (bits, max_kl, memory)) != 1:
        raise UserError("a cache is tuned to one target: give one of bits, max_kl and memory")
    folder = None if out is None else Path(out).expanduser()
    if folder is not None:
        require_vacant(folder)
    corpus = read_corpus(text)
    loaded = model if isinstance(model, Model) else load_model(model, dtype=dtype)
    target = _target(loaded.config, bits, max_kl, memory, context, batch)
    window = min(whole("window", window, 64, INT32, "64 tokens or more"), loaded.config.context)
    _require_room(loaded.config, target, _usable(window))
    ids = text_tokens(loaded.tokenizer, corpus.text)
    read = _windows(loaded, ids, window, target)
    artefact = _artefact(loaded, calibration)
    spec, kl = _chosen(loaded, artefact, read, target)
    caches = {**artefact.manifest.caches, name: spec_text(spec)}
    manifest = dataclasses.replace(artefact.manifest, caches=caches)
    place = folder or kept_calibration(loaded, _BALANCED).folder
    save_artefact(dataclasses.replace(artefact, manifest=manifest), place, replace=folder is None)
    keep_name(name, spec_text(spec))
    return Tuned(name, spec, _bits(loaded.config, spec, target.context), kl, place)


def _target(config: ModelConfig, bits, max_kl, memory, context, batch) -> Target:
    return Target(
        None if bits is None else number("bits", bits, 1, 32, "a number from 1 to 32"),
        None if max_kl is None else number("max_kl", max_kl, 1e-6, 100, "a number above 0"),
        None if memory is None else parse_bytes(memory),
        config.context
        if context is None
        else whole("context", context, 64, config.context, f"64 to {config.context} tokens"),
        whole("batch", batch, 1, INT32, "a whole number, 1 or more"),
    )


def _require_room(config: ModelConfig, target: Target, windows: list[Window]) -> None:
    """Refuses bits, or memory, that the smallest cache does not keep."""
    if (limit := _limit(config, target)) is None:
        return
    narrow = [Pair(0, 0)] * config.layers
    smallest = min(limit.size(cache_of(narrow, window)) for window in windows)
    if smallest > limit.most:
        raise UserError(
            f"{limit.given}: the smallest cache takes {limit.shown(smallest)} at "
            f"{target.context:,} tokens; give more, or another context"
        )


def _windows(model: Model, ids: list[int], window: int, target: Target) -> Text:
    """The windows of a text; refuses one that is too short, and hours on a CPU."""
    usable = _usable(window)
    every = side_options(usable[0])
    narrow = set(narrowest_alike(every))
    leading = len(leading_tokens(model.tokenizer))
    how = {"window": window, "context": target.context, "leading": leading}
    text = cut(ids, every[0], batch=_BATCH, seed=0, **how)
    passes = len(narrow) * model.config.layers / 2 + 2 * (len(every) + 2 * len(usable))
    each = passes * _READ * _BATCH * operations(model.config, window)
    require_time("measuring what every layer costs", each, "a shorter window")
    return text


def _usable(tokens: int) -> list[Window]:
    """Windows behind which a quarter of a text's tokens read coded ones; or the smallest."""

    def read_coded(window: Window) -> int:
        return tokens - first_that_reads_coded(side_options(window)[0], tokens)

    return [window for window in WINDOWS if 4 * read_coded(window) >= tokens] or [WINDOWS[0]]


def _artefact(model: Model, given: str | Path | None) -> Artefact:
    """As given, as kept for these weights, or made now."""
    if given is not None:
        artefact = balanced_artefact(given)
        require_same_weights(artefact.calibration, model)
        return artefact
    return artefact_for(model, _BALANCED, CALIBRATION_TOKENS)


def _chosen(
    model: Model, artefact: Artefact, text: Text, target: Target
) -> tuple[CacheSpec, float]:
    """The cache, and its KL on what was held out."""
    config, how = model.config, (model.config, model.params, artefact.calibration)
    read = [text.batch_of(step) for step in range(_READ)]
    usable = _usable(text.windows.shape[1])
    at = min(usable, key=lambda window: abs(window.recent - _BALANCED.recent))
    options = list(dict.fromkeys(narrowest_alike(side_options(at))))
    with count_bar("Coding one layer at a time", len(read) * config.layers * len(options)) as bar:
        alone = dict(zip(options, sensitivities(*how, options, read, bar), strict=True))
    count = len(side_options(at)) + 2 * (len(usable) - 1)
    with count_bar("Measuring widths and windows", count) as bar:
        losses = losses_of_options(*how, alone, at, usable, read, bar)
    every = candidates(losses, config.head_dim)

    def bits(spec: CacheSpec) -> float:
        return _bits(config, spec, target.context)

    def measure(spec: CacheSpec) -> float:
        with spinner("Measuring what was chosen"):
            kl = measured(*how, spec, read)
        note(f"KL {kl:.3g} at {bits(spec):.3g} bits: {spec_text(spec)}")
        return kl

    limit = _limit(config, target)
    if limit is not None:
        found = least_loss(every, lambda spec: limit.size(spec) <= limit.most)
        assert found is not None  # the smallest is one of them
    else:
        assert target.max_kl is not None
        found = fewest_bits(every, target.max_kl, bits, measure)
        if found is None:
            raise UserError(f"max_kl={target.max_kl:g}: no cache has so little; give more")
    with spinner("Measuring what was held out"):
        return found.spec, measured(*how, found.spec, list(text.checks()))


def _limit(config: ModelConfig, target: Target) -> _Limit | None:
    """Bits, or memory; None where the KL is the target."""
    if target.bits is not None:
        return _Limit(
            target.bits,
            lambda spec: _bits(config, spec, target.context),
            f"bits={target.bits:g}",
            "{:.3g}".format,
        )
    if target.memory is None:
        return None
    weights, shape = weight_bytes(config, compute_dtype(None)), CacheShape.of(config)
    return _Limit(
        target.memory,
        lambda spec: weights + pool_bytes(spec, shape, target.context, target.batch),
        f"memory={format_bytes(target.memory)}",
        format_bytes,
    )


def _bits(config: ModelConfig, spec: CacheSpec, context: int) -> float:
    return bits_per_element(spec, CacheShape.of(config), context)
