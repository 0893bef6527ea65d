"""How well a model predicts text through its cache: perplexity, and KL against the 16-bit cache."""

import functools
import gzip
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.cache.basis import Basis
from jkvq.cache.calibrated import Calibration, methods_for
from jkvq.cache.footprint import bits_per_element
from jkvq.cache.layout import KVCache, empty_cache, pages_for
from jkvq.cache.spec_text import parse_spec
from jkvq.calibration.artefact import load_artefact
from jkvq.evaluation.baselines import BASELINES, ChannelWise
from jkvq.evaluation.reconstruct import Reconstruction, TokenWise, attend_reconstructed
from jkvq.llm import LLM, checked_basis, find_calibration, require_unfolded, with_cache
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, forward, logits, run
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar

CHUNK = 256  # tokens per step


class Subject(Protocol):
    """A model with a cache, run over one sequence; every token reads the others as decode would."""

    @property
    def llm(self) -> LLM: ...

    def start(self, tokens: int) -> Any:
        """The state before the first of at most so many tokens."""
        ...

    def step(
        self, state: Any, tokens: Int[np.ndarray, "1 T"], count: int, position: int
    ) -> tuple[Float[Array, "1 T D"], Any]:
        """Final hidden states of the next tokens, the first ``count`` real, and the new state.

        ``position`` is that of the sequence's first token.
        """
        ...

    def bits_per_element(self, context: int) -> float: ...


@dataclass(frozen=True)
class Cached:
    """A model running over its cache."""

    llm: LLM

    def start(self, tokens: int) -> KVCache:
        pages = max(1, pages_for(tokens, self.llm.spec))
        table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        return empty_cache(self.llm.spec, self.llm.config.cache_shape, pages + 1, table)

    def step(self, state: KVCache, tokens, count: int, position: int):
        llm, counts = self.llm, jnp.asarray([count], jnp.int32)
        return _cached_step(
            llm.config, llm.params, llm.basis, state, tokens, counts, jnp.int32(position)
        )

    def bits_per_element(self, context: int) -> float:
        return bits_per_element(self.llm.spec, self.llm.config.cache_shape, context)


class _Held(NamedTuple):
    """Keys and values of all layers, and how many tokens they are of."""

    k: Float[Array, "L S K H"]
    v: Float[Array, "L S K H"]
    length: Int[Array, ""]


@dataclass(frozen=True)
class Baseline:
    """A model, loaded with a cache that folds nothing, running over what a baseline gives back."""

    llm: LLM
    kept: ChannelWise

    def start(self, tokens: int) -> _Held:
        L, K, H = self.llm.config.cache_shape
        S = -(-tokens // CHUNK) * CHUNK
        zeros = jnp.zeros((L, S, K, H))
        return _Held(zeros, jnp.zeros_like(zeros), jnp.int32(0))

    def step(self, state: _Held, tokens, count: int, position: int):
        hidden, k, v = _reconstructed_step(
            self.llm.config, self.llm.params, self.kept, *state, tokens, jnp.int32(position)
        )
        return hidden, _Held(k, v, state.length + count)

    def bits_per_element(self, context: int) -> float:
        return self.kept.bits_per_element(self.llm.config.cache_shape, context)


def subject(
    llm: LLM,
    cache: str,
    calibration: Calibration | str | Path | None = None,
    *,
    implementation: str | None = None,
) -> Subject:
    """The model with a cache, or a baseline, of this name; ``llm`` must fold nothing, as bf16."""
    if cache in BASELINES:
        require_unfolded(llm)
        BASELINES[cache].check(llm.config.head_dim)
        return Baseline(llm, BASELINES[cache])
    return Cached(with_cache(llm, cache, calibration, implementation=implementation))


def reconstruction(
    llm: LLM, cache: str, calibration: Calibration | str | Path | None = None
) -> Reconstruction:
    """What a cache, or a baseline, of this name gives back; ``llm`` must fold nothing, as bf16."""
    require_unfolded(llm)
    if cache in BASELINES:
        BASELINES[cache].check(llm.config.head_dim)
        return BASELINES[cache]
    spec = parse_spec(cache)
    found = find_calibration(llm.name, spec, calibration)
    return TokenWise(spec, checked_basis(llm.config, spec, found), llm.config.layers)


def choose_calibration(folders: Sequence[Path], cache: str) -> Path | None:
    """The first of these artefacts that serves a cache; None is the one kept for the model."""
    if cache in BASELINES:
        return None
    methods = methods_for(parse_spec(cache))
    return next((path for path in folders if load_artefact(path).manifest.method in methods), None)


@dataclass(frozen=True)
class Score:
    """How well the tokens of a text were predicted.

    kl: mean KL divergence of the next-token distribution from the reference's, in nats; None
        without a reference.
    bits_per_element: of the cache at the length of a window.
    """

    ppl: float  # exp of nll
    nll: float  # mean negative log-likelihood, in nats
    kl: float | None
    scored: int  # tokens
    bits_per_element: float


class Span(NamedTuple):
    """A window over the tokens: inputs start to stop; tokens from ``fresh`` on are scored."""

    start: int
    stop: int
    fresh: int


def spans(tokens: int, context: int, stride: int, first: int = 1) -> Iterator[Span]:
    """Windows of ``context`` tokens, ``stride`` apart: each token from ``first`` is scored once."""
    scored = first
    for start in range(0, tokens, stride):
        stop = min(start + context, tokens)
        yield Span(start, stop, scored)
        scored = max(scored, stop + 1)  # a window's last input predicts the token after it
        if scored >= tokens:
            return


def perplexity(llm: LLM, tokens: list[int]) -> Score:
    """Perplexity of ``tokens``, where every token sees all before it and itself as stored."""
    return compare({"": Cached(llm)}, tokens)[""]


def compare(
    subjects: Mapping[str, Subject],
    tokens: list[int],
    *,
    reference: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    first: int = 1,
    position: int = 0,
    label: str = "Scoring",
) -> dict[str, Score]:
    """Scores subjects side by side, each against the one called ``reference``.

    Args:
        subjects: by name; all of one model.
        tokens: of the text.
        reference: the subject that KL is measured from.
        context: tokens of a window, in which each token sees those before it; None is all.
        stride: tokens from one window to the next; None is ``context``. A smaller one gives each
            scored token at least ``context - stride`` tokens before it, but for the first window.
        first: the first token that is scored.
        position: where a window's first token stands in the model's context. Scores depend on
            distances alone, so nothing but a cache makes a difference of it.
        label: of the progress bar.
    """
    config = next(iter(subjects.values())).llm.config
    context, stride = _checked_windows(config, len(tokens), context, stride, position)
    totals = {name: _Total() for name in subjects}
    windows = list(spans(len(tokens), context, stride, first))
    work = sum(span.stop - span.start for span in windows) * len(subjects)
    with count_bar(label, work) as bar:
        for span in windows:
            states = {name: subject.start(context) for name, subject in subjects.items()}
            for start in range(span.start, span.stop, CHUNK):
                stop = min(start + CHUNK, span.stop)
                chunk = range(start, stop)
                _score_chunk(
                    subjects, states, totals, tokens, chunk, span.fresh, position, reference
                )
                bar.advance((stop - start) * len(subjects))
    return {
        name: totals[name].score(subject.bits_per_element(context), reference is not None)
        for name, subject in subjects.items()
    }


def _checked_windows(
    config: ModelConfig, tokens: int, context: int | None, stride: int | None, position: int
):
    if tokens < 2 or (context is None and tokens > config.context):
        raise UserError(
            f"{tokens} tokens: from 2 to the model's context of {config.context} are scored at "
            "once; more are scored in windows, with a context"
        )
    context = tokens if context is None else context
    if not 1 <= context <= config.context:
        raise UserError(f"context={context}: this model takes 1 to {config.context} tokens")
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise UserError(f"stride={stride}: from 1 to the context of {context}")
    context = min(context, tokens)
    if not 0 <= position <= config.context - context:
        raise UserError(
            f"position={position}: from 0 to {config.context - context}, as {context} tokens are "
            f"read at once and the model's context is {config.context}"
        )
    return context, stride


@dataclass
class _Total:
    nll: float = 0.0
    kl: float = 0.0
    scored: int = 0

    def score(self, bits: float, compared: bool) -> Score:
        nll, kl = self.nll / self.scored, self.kl / self.scored
        if math.isnan(nll):
            raise UserError(
                "the model's scores are not numbers (NaN): its weights are damaged, or the dtype "
                "is too narrow for them"
            )
        return Score(math.exp(min(nll, 700.0)), nll, kl if compared else None, self.scored, bits)


def _score_chunk(
    subjects, states, totals, tokens, chunk: range, fresh: int, position: int, reference
) -> None:
    """Runs a chunk through every subject, the reference first, and adds up what is scored in it."""
    inputs, targets = np.zeros((2, 1, CHUNK), np.int32)
    inputs[0, : len(chunk)] = tokens[chunk.start : chunk.stop]
    following = tokens[chunk.start + 1 : chunk.stop + 1]
    targets[0, : len(following)] = following
    counted = np.zeros(CHUNK, bool)
    counted[max(0, fresh - 1 - chunk.start) : len(following)] = True
    expected = None
    for name in sorted(subjects, key=lambda name: name != reference):
        subject, total = subjects[name], totals[name]
        hidden, states[name] = subject.step(states[name], inputs, len(chunk), position)
        if not counted.any():
            continue
        predicted = _log_probabilities(subject.llm.config, subject.llm.params, hidden)
        if name == reference:
            expected = predicted
        losses, divergence = _losses(
            predicted, targets, predicted if expected is None else expected
        )
        total.nll += float(np.asarray(losses, np.float64)[0, counted].sum())
        total.kl += float(np.asarray(divergence, np.float64)[0, counted].sum())
        total.scored += int(counted.sum())


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _cached_step(
    config: ModelConfig,
    params: Params,
    basis: Basis,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    first: Int[Array, ""],
) -> tuple[Float[Array, "B T D"], KVCache]:
    return forward(config, params, basis, cache, tokens, count, own="stored", first=first)


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("k", "v"))
def _reconstructed_step(
    config: ModelConfig,
    params: Params,
    kept: ChannelWise,
    k: Float[Array, "L S K H"],
    v: Float[Array, "L S K H"],
    length: Int[Array, ""],
    tokens: Int[Array, "1 T"],
    first: Int[Array, ""],
):
    position = length + jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def attend(layer: int, q, new_k, new_v, held):
        k, v = (
            jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (layer, length, 0, 0))
            for old, new in zip(held, (new_k, new_v), strict=True)
        )
        out = attend_reconstructed(
            kept.layer(layer), q[0], k[layer], v[layer], position, scale=config.head_dim**-0.5
        )
        return out[None].astype(q.dtype), (k, v)

    hidden, (k, v) = run(config, params, tokens, first + position[None], attend, (k, v))
    return hidden, k, v


@functools.partial(jax.jit, static_argnames="config")
def _log_probabilities(config: ModelConfig, params: Params, hidden) -> Float[Array, "B T V"]:
    return jax.nn.log_softmax(logits(config, params, hidden), axis=-1)


@jax.jit
def _losses(
    predicted: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    expected: Float[Array, "B T V"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Negative log-likelihood of each target, and KL(expected || predicted)."""
    chosen = jnp.take_along_axis(predicted, targets[..., None], axis=-1)[..., 0]
    return -chosen, (jnp.exp(expected) * (expected - predicted)).sum(-1)


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it ends in .gz."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from None


def first_tokens(llm: LLM, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of a text, with no leading token added."""
    tokens = list(llm.tokenizer.hf.encode(text, add_special_tokens=False))
    if len(tokens) < count:
        raise UserError(
            f"{count} tokens were asked for and the text has {len(tokens)}: ask for fewer, or give "
            "a longer text"
        )
    return tokens[:count]
