"""From a model and a text to an artefact."""

import dataclasses
import hashlib
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkvq.cache.calibrated import methods_for
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import parse_spec, spec_text
from jkvq.calibration.artefact import (
    Artefact,
    Manifest,
    calibration_digest,
    default_folder,
    make_artefact,
    save_artefact,
)
from jkvq.calibration.clip import choose_clips, require_clipping
from jkvq.calibration.learning.kept_state import forget
from jkvq.calibration.observe import WINDOWS, observe
from jkvq.calibration.prose import default_text
from jkvq.calibration.solve import (
    LEARNING,
    CalibrationOptions,
    Solution,
    check_method,
    method_label,
    output_projections,
    read_options,
    solve,
)
from jkvq.defaults import CALIBRATION_TOKENS, PLAIN_CACHE
from jkvq.engine.generate import generate
from jkvq.evaluation.corpus import first_of, leading_tokens, read_text, text_tokens
from jkvq.llm import LLM, missing_calibration, require_same_weights, with_cache
from jkvq.loading.learn import (
    balanced_artefact,
    learned,
    learned_cache,
    state_file,
    text_to_learn,
)
from jkvq.models.dtype import DTypeLike
from jkvq.models.model import Model, load_model
from jkvq.support.arguments import INT32, flag, refusal, whole
from jkvq.support.atomic import require_vacant
from jkvq.support.errors import UserError
from jkvq.support.progress import note
from jkvq.version import VERSION

DEFAULT_CORPUS = "pydoc_data.topics"
_SELF_SEQUENCES = 8  # texts that the model writes, as one batch


class Corpus(NamedTuple):
    """A text with a name."""

    name: str
    text: str


def calibrate(
    model: str | Path | Model,
    *,
    method: str = "jkvq",
    text: str | Path | Corpus | None = None,
    self_written: bool = False,
    tokens: int = CALIBRATION_TOKENS,
    out: str | Path | None = None,
    dtype: DTypeLike | None = None,
    learn_from: str | Path | None = None,
    **options: Any,
) -> Artefact:
    """Calibrates a model for the caches of a method, and writes the artefact.

    Args:
        model: a name, folder or file, or what `jkvq.load_model` returns.
        method: jkvq, oscar, hessian, kmeans, blockgtq or center; see `jkvq calibrate --help`.
        text: a text file, or a `Corpus`; None takes the prose of Python's own documentation.
        self_written: calibrate on text that the model writes.
        tokens: how many of the text's first ones to read.
        out: a new folder; None keeps the artefact where `load` finds it for this model.
        dtype: as for `load`, where the model is not loaded yet.
        learn_from: a calibration's folder that learning goes on from; None makes the start from the
            text's first tokens.
        **options: see `jkvq.calibration.solve.CalibrationOptions`.
    """
    if isinstance(model, LLM):
        raise UserError(
            "calibrate takes a model without a cache: give a name or what jkvq.load_model returns"
        )
    if isinstance(model, Model) and dtype is not None:
        raise refusal("dtype", dtype, "the model is loaded already; leave it out")
    chosen = _written_out(read_options(method, options))
    _clipped(chosen)
    start = _start(learn_from, chosen)
    tokens = whole("tokens", tokens, 1, INT32, "a whole number; some thousands are good")
    flag("self_written", self_written)
    if text is not None and self_written:
        raise UserError("a text and --self exclude each other: give one of them")
    corpus = None if self_written else read_corpus(text)
    name = model.name if isinstance(model, Model) else str(model)
    label = method_label(method, chosen)
    folder = default_folder(name, label) if out is None else Path(out).expanduser()
    if out is None and _of_its_own(chosen):
        raise UserError(
            "other than default options make a calibration of their own: name its folder with out"
        )
    if out is not None:
        require_vacant(folder)
    loaded = model if isinstance(model, Model) else load_model(model, dtype=dtype)
    if start is not None:
        require_same_weights(start.calibration, loaded)
    artefact = _made(loaded, method, chosen, corpus, tokens, folder, start)
    save_artefact(artefact, folder, replace=out is None)
    forget(state_file(folder))
    return artefact


def _written_out(chosen: CalibrationOptions) -> CalibrationOptions:
    """Options in which caches are no names, which the user may give to others later."""
    given = {name: getattr(chosen, name) for name in ("clip_for", "learn_for")}
    texts = {name: spec_text(parse_spec(text)) for name, text in given.items() if text is not None}
    return dataclasses.replace(chosen, **texts)


def _start(learn_from: str | Path | None, chosen: CalibrationOptions) -> Artefact | None:
    """What learning goes on from, if that is given; refuses what only a start would look at."""
    if learn_from is None:
        return None
    if learned_cache(chosen) is None:
        raise refusal(
            "learn_from", str(learn_from), "only where something is learned; leave it out"
        )
    for name in ("shared", "clip_for"):
        given = getattr(chosen, name)
        if given != getattr(CalibrationOptions, name):
            raise refusal(name, given, "learn_from has the start already; leave one of them out")
    return balanced_artefact(learn_from)


def _of_its_own(chosen: CalibrationOptions) -> bool:
    """Whether options make another calibration than the one that is kept for all caches."""
    free = ("centroids", "learn_for", "seed", *LEARNING)
    usual = {name: getattr(CalibrationOptions, name) for name in free}
    return dataclasses.replace(chosen, **usual) != CalibrationOptions()


def calibrates_on_first_use(spec: CacheSpec) -> bool:
    """Whether what a cache needs is quickly made; centroids take minutes."""
    return not methods_for(spec)[0].startswith("kmeans")


def calibrate_on_first_use(
    model: Model, spec: CacheSpec, folder: Path, tokens: int, reason: str
) -> Artefact:
    """Calibrates a model for a cache on the default text, and keeps the artefact if it can.

    ``reason``, why there is none to take, begins the line that the person who waits reads.
    """
    if not calibrates_on_first_use(spec):
        raise missing_calibration(model.name, spec)
    method = methods_for(spec)[0]
    note(f"{reason}: calibrating on {tokens:,} tokens of {DEFAULT_CORPUS}, kept in {folder}")
    artefact = _made(model, method, CalibrationOptions(), read_corpus(None), tokens, folder)
    try:
        save_artefact(artefact, folder, replace=True)
    except UserError as error:
        note(f"The calibration is for this run only: {error}")
    return artefact


def _made(
    model: Model,
    method: str,
    chosen: CalibrationOptions,
    corpus: Corpus | None,
    tokens: int,
    folder: Path,
    start: Artefact | None = None,
) -> Artefact:
    """The artefact of a text, or of one that the model writes; ``folder`` is where it will be.

    ``start``: what learning goes on from, if there is such a one.
    """
    _require_numbers(model, model.params)
    check_method(method, chosen, model.config, tokens)
    context = chosen.context or model.config.context
    chosen = dataclasses.replace(chosen, window=min(chosen.window, context))
    spec = learned_cache(chosen)
    if corpus is None:
        corpus, every = _self_written(model, tokens)
    else:
        every = text_tokens(model.tokenizer, corpus.text)
    text = None if spec is None else text_to_learn(model, spec, chosen, every)
    manifest = _manifest(model, method_label(method, chosen), chosen, corpus, tokens)
    if start is None:
        made = make_artefact(_solved(model, method, chosen, first_of(every, tokens)), manifest)
    else:
        options = manifest.options | {"learn_from": calibration_digest(start.calibration)}
        before = {name: getattr(start.manifest, name) for name in ("tokens", "caches")}
        manifest = dataclasses.replace(manifest, options=options, **before)
        made = dataclasses.replace(start, manifest=manifest)
    if spec is None or text is None:
        return made
    found = learned(model, made.calibration, spec, text, chosen, folder)
    kl = {"start_kl": found.start_kl, "kl": found.kl, "step": found.step}
    manifest = dataclasses.replace(manifest, learned=kl)
    return dataclasses.replace(made, calibration=found.calibration, manifest=manifest)


def _solved(model: Model, method: str, chosen: CalibrationOptions, ids: list[int]) -> Solution:
    """What a method makes of a text's tokens."""
    reading, leading = (model.config, model.params, ids), len(leading_tokens(model.tokenizer))
    moments, captured = observe(
        *reading,
        window=chosen.window,
        context=chosen.context or model.config.context,
        windows=WINDOWS,
        leading=leading,
        capture=method == "kmeans",
    )
    _require_numbers(model, moments)
    projected = output_projections(model.config, model.params)
    solution = solve(method, chosen, moments, captured, projected)
    clipped = _clipped(chosen)
    if clipped is None:
        return solution
    found = choose_clips(*reading, clipped, solution.calibration, chosen, leading)
    return dataclasses.replace(solution, calibration=found)


def _clipped(chosen: CalibrationOptions) -> CacheSpec | None:
    """The cache whose clip ratios are asked for."""
    if chosen.clip_for is None:
        return None
    spec = parse_spec(chosen.clip_for)
    require_clipping(spec)
    return spec


def read_corpus(text: str | Path | Corpus | None) -> Corpus:
    """A text by its file, as it is, or the default one."""
    if isinstance(text, Corpus):
        return text
    if text is None:
        return Corpus(DEFAULT_CORPUS, default_text())
    if not isinstance(text, str | Path) or not _is_file(path := Path(text).expanduser()):
        given = str(text) if isinstance(text, Path) else text
        raise refusal("text", given, "there is no such file; write the text to one, give its path")
    return Corpus(path.name, read_text(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # what is longer than any path may be
        return False


@jax.jit
def _all_finite(weight: jax.Array) -> jax.Array:
    return jnp.isfinite(weight).all()


def _finite(array: jax.Array | np.ndarray) -> bool:
    """Whether all of an array are numbers; it stays where it is."""
    return bool(np.isfinite(array).all() if isinstance(array, np.ndarray) else _all_finite(array))


def _require_numbers(model: Model, tree: Any) -> None:
    """Refuses a model one of whose weights, or of their products, is NaN or infinite."""
    if not all(_finite(leaf) for leaf in jax.tree.leaves(tree)):
        raise UserError(
            f"{model.name} cannot be calibrated: some of its weights, or what it makes of a text, "
            "are not numbers (NaN or infinite); they are damaged, fetch the model again"
        )


def _self_written(model: Model, tokens: int) -> tuple[Corpus, list[int]]:
    """Text that the model writes from nothing but its first tokens, and its tokens."""
    each = min(-(-tokens // _SELF_SEQUENCES), model.config.context - 64)
    starts = ["The", "In", "A", "When", "It", "On", "For", "This"]
    ids = leading_tokens(model.tokenizer)
    llm, seed = with_cache(model, PLAIN_CACHE), 0
    while len(ids) < tokens:
        written = generate(
            llm,
            starts,
            chat=False,
            max_new_tokens=each,
            temperature=1.0,
            seed=[seed + i for i in range(len(starts))],
            ignore_eos=True,
        )
        for generation in written:
            if generation.error is not None:
                raise UserError(generation.error)
            ids += generation.tokens
        seed += len(starts)
    ids = ids[:tokens]
    return Corpus("self", model.tokenizer.decode(ids)), ids


def _manifest(
    model: Model, label: str, options: CalibrationOptions, corpus: Corpus, tokens: int
) -> Manifest:
    given = dataclasses.asdict(options)
    changed = {
        name: value for name, value in given.items() if value != getattr(CalibrationOptions, name)
    }
    config = model.config
    return Manifest(
        model=model.name,
        weights=model.fingerprint,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        method=label,
        options=changed,
        windows=dataclasses.asdict(WINDOWS),
        corpus=corpus.name,
        corpus_sha256=hashlib.sha256(corpus.text.encode()).hexdigest(),
        tokens=tokens,
        versions={"jkvq": VERSION, "python": platform.python_version()}
        | {name: version(name) for name in ("jax", "numpy")},
    )
