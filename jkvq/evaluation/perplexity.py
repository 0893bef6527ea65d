"""How well a model predicts text through its cache: perplexity, and KL against the 16-bit cache."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkvq.evaluation.subjects import CHUNK, Cached, Subject
from jkvq.llm import LLM
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params, logits
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar


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


class Window(NamedTuple):
    """A sequence of its own: the model reads the inputs, and some of what it predicts is scored."""

    inputs: list[int]
    targets: list[int]  # the token after each input; the text's last token has none
    first: int  # the first input whose target is scored


def windows(
    tokens: list[int], context: int, stride: int, *, first: int = 1, leading: int = 0
) -> Iterator[Window]:
    """Windows of at most ``context`` tokens, ``stride`` apart in the text.

    Every window begins as a prompt does, with the ``leading`` first tokens: a model that always
    reads BOS keeps much of its attention there, and another first token would take that place. Each
    token from ``first`` on, but a leading one, is scored once.
    """
    scored = max(first, leading, 1)
    for start in range(leading, len(tokens), stride):
        stop = min(start + context - leading, len(tokens))
        inputs = tokens[:leading] + tokens[start:stop]
        targets = [*inputs[1:], *tokens[stop : stop + 1]]
        yield Window(inputs, targets, leading + scored - start - 1)
        scored = max(scored, stop + 1)  # a window's last input predicts the token after it
        if scored >= len(tokens):
            return


def perplexity(llm: LLM, tokens: list[int]) -> Score:
    """Perplexity of ``tokens``, where every token sees all before it and itself as stored."""
    return compare({"": Cached(llm)}, tokens)[""]


def compare(subjects: Mapping[str, Subject], tokens: list[int], **how: Any) -> dict[str, Score]:
    """Scores subjects side by side over all of a text; ``how`` as `compare_lengths` takes it."""
    return compare_lengths(subjects, tokens, [len(tokens)], **how)[len(tokens)]


def compare_lengths(
    subjects: Mapping[str, Subject],
    tokens: list[int],
    lengths: Sequence[int],
    *,
    reference: str | None = None,
    context: int | None = None,
    stride: int | None = None,
    first: int = 1,
    leading: int = 0,
    position: int = 0,
    label: str = "Scoring",
) -> dict[int, dict[str, Score]]:
    """Scores subjects side by side, each against the one called ``reference``.

    Args:
        subjects: by name; all of one model.
        tokens: of the text.
        lengths: the scores of the first so many tokens are given, each for itself. The text is
            read once, as what a token sees does not depend on what comes after it.
        reference: the subject that KL is measured from.
        context: tokens of a window, in which each token sees those before it; None is all.
        stride: tokens from one window to the next; None is what a window holds of the text. A
            smaller one gives each scored token more tokens before it, but for the first window.
        first: the first token that is scored.
        leading: how many of the first tokens are no text but begin every window (BOS); see
            `leading_tokens`. They count among a window's tokens and are never scored.
        position: where a window's first token stands in the model's context. Scores depend on
            distances alone, so nothing but a cache makes a difference of it.
        label: of the progress bar.
    """
    config = next(iter(subjects.values())).model.config
    context, stride = _checked_windows(config, len(tokens), context, stride, leading, position)
    skipped = max(first, leading, 1)
    for length in lengths:
        if not skipped < length <= len(tokens):
            allowed = f"from {skipped + 1} to the text's {len(tokens)}"
            raise UserError(f"a length of {length} tokens: {allowed}")
    losses = {name: _Losses() for name in subjects}
    read = list(windows(tokens, context, stride, first=first, leading=leading))
    work = sum(len(window.inputs) for window in read) * len(subjects)
    with count_bar(label, work) as bar:
        for window in read:
            states = {name: subject.start(context) for name, subject in subjects.items()}
            for start in range(0, len(window.inputs), CHUNK):
                chunk = range(start, min(start + CHUNK, len(window.inputs)))
                _score_chunk(subjects, states, losses, window, chunk, position, reference)
                bar.advance(len(chunk) * len(subjects))
    compared = reference is not None
    return {
        length: {
            name: losses[name].score(
                length - skipped, subject.bits_per_element(min(context, length)), compared
            )
            for name, subject in subjects.items()
        }
        for length in lengths
    }


def _checked_windows(
    config: ModelConfig,
    tokens: int,
    context: int | None,
    stride: int | None,
    leading: int,
    position: int,
) -> tuple[int, int]:
    """(context, stride); refuses windows that cannot be."""
    if tokens < max(2, leading + 1) or (context is None and tokens > config.context):
        raise UserError(
            f"{tokens} tokens: from {max(2, leading + 1)} to the model's context of "
            f"{config.context} are scored at once; more are scored in windows, with a context"
        )
    context = tokens if context is None else context
    if not leading < context <= config.context:
        raise UserError(
            f"context={context}: this model takes {leading + 1} to {config.context} tokens"
        )
    stride = context - leading if stride is None else stride
    if not 1 <= stride <= context - leading:
        most = f"the context of {context}"
        if leading:
            most += f" without the leading {leading}"
        raise UserError(f"stride={stride}: from 1 to {most}")
    context = min(context, tokens)
    if not 0 <= position <= config.context - context:
        raise UserError(
            f"position={position}: from 0 to {config.context - context}, as {context} tokens are "
            f"read at once and the model's context is {config.context}"
        )
    return context, stride


@dataclass
class _Losses:
    """Of every scored token, in the text's order."""

    nll: list[Float[np.ndarray, " n"]] = field(default_factory=list)
    kl: list[Float[np.ndarray, " n"]] = field(default_factory=list)

    def score(self, count: int, bits: float, compared: bool) -> Score:
        """That of the first ``count``."""
        nll, kl = (float(np.concatenate(each)[:count].mean()) for each in (self.nll, self.kl))
        if math.isnan(nll):
            raise UserError(
                "the model's scores are not numbers (NaN): its weights are damaged, or the dtype "
                "is too narrow for them"
            )
        return Score(math.exp(min(nll, 700.0)), nll, kl if compared else None, count, bits)


def _score_chunk(
    subjects: Mapping[str, Subject],
    states: dict[str, Any],
    found: Mapping[str, _Losses],
    window: Window,
    chunk: range,
    position: int,
    reference: str | None,
) -> None:
    """Runs a chunk through every subject, the reference first, and adds what is scored in it."""
    inputs, targets = np.zeros((2, 1, CHUNK), np.int32)
    inputs[0, : len(chunk)] = window.inputs[chunk.start : chunk.stop]
    following = window.targets[chunk.start : chunk.stop]
    targets[0, : len(following)] = following
    counted = np.zeros(CHUNK, bool)
    counted[max(0, window.first - chunk.start) : len(following)] = True
    expected = None
    for name in sorted(subjects, key=lambda name: name != reference):
        subject = subjects[name]
        hidden, states[name] = subject.step(states[name], inputs, len(chunk), position)
        if not counted.any():
            continue
        predicted = log_probabilities(subject.model.config, subject.model.params, hidden)
        if name == reference:
            expected = predicted
        losses, divergence = token_losses(
            predicted, targets, predicted if expected is None else expected
        )
        found[name].nll.append(np.asarray(losses, np.float64)[0, counted])
        found[name].kl.append(np.asarray(divergence, np.float64)[0, counted])


@functools.partial(jax.jit, static_argnames="config")
def log_probabilities(config: ModelConfig, params: Params, hidden) -> Float[Array, "B T V"]:
    """Of every next token, after each of the hidden states."""
    return jax.nn.log_softmax(logits(config, params, hidden), axis=-1)


@jax.jit
def token_losses(
    predicted: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    expected: Float[Array, "B T V"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Negative log-likelihood of each target, and KL(expected || predicted)."""
    chosen = jnp.take_along_axis(predicted, targets[..., None], axis=-1)[..., 0]
    return -chosen, (jnp.exp(expected) * (expected - predicted)).sum(-1)
