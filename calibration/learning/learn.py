"""Learning a calibration: Adam on the damped next-token KL, from the balanced start.

The KL on windows that nothing is learned from decides which step is kept, and whether the rate is
too great: what is much worse than the start goes back to the best, at half the rate.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jkvq.cache.calibrated import Calibration
from jkvq.cache.specs.spec import CacheSpec, SideSpec
from jkvq.cache.specs.spec_text import spec_text
from jkvq.calibration.learning.kept_state import keep, kept
from jkvq.calibration.learning.parameters import (
    Sides,
    Start,
    starting_from,
    turned,
    unchanged,
    with_learned,
)
from jkvq.calibration.learning.passes import Layers, Network
from jkvq.calibration.learning.text import Text
from jkvq.models.config import ModelConfig
from jkvq.models.decoder import Params
from jkvq.support.errors import UserError
from jkvq.support.progress import Bar, count_bar, note, spinner

CHECK_EVERY = 25  # steps
_WARM_UP = 0.05  # of all steps
# Times the start's KL. What was learned before loses a little while the rate is high, and gains
# when it falls: going back at every loss would leave it where it is.
_ASTRAY = 1.25
_HALVINGS = 4  # of the rate, until a run that goes astray again is ended
# A channel turns by the angles to all others at once, and batches agree little about each: so an
# angle moves by this over the channels of a head where a mean or a stretch moves by 1.
_TURN = 16


class State(NamedTuple):
    """All that a run needs to go on, after so many steps.

    best, best_kl: the learned values with the least KL on what is held out, and that KL.
    halvings: of the rate, so far.
    """

    step: int
    learned: Sides
    optimizer: Any
    best: Sides
    best_step: int
    best_kl: float
    start_kl: float
    halvings: int


@dataclass(frozen=True)
class Outcome:
    """A learned calibration, and the KL on what was held out: of the start, and of it."""

    calibration: Calibration
    start_kl: float
    kl: float
    step: int  # that it is of


def require_learnable(spec: CacheSpec) -> None:
    """Refuses a cache whose calibration has nothing that could be learned."""

    def learnable(side: SideSpec) -> bool:
        fitted = side.codec == "affine" and side.step == "fitted" and side.clip == 1
        return side.rotation == "balanced" and fitted

    if not all(map(learnable, spec.sides)):
        raise UserError(
            f"learn_for={spec_text(spec)}: only caches with balanced rotations and fitted steps "
            "are learned; jkvq-int2 is one"
        )


def learn(
    config: ModelConfig,
    params: Params,
    calibration: Calibration,
    spec: CacheSpec,
    text: Text,
    *,
    steps: int,
    rate: float,
    place: Path,
    identity: str,
) -> Outcome:
    """The calibration with rotations, stretches and means learned for a cache.

    Args:
        config, params: the model.
        calibration: where it starts: balanced rotations.
        spec: the cache.
        text: what it learns from.
        steps: how many batches.
        rate: the greatest learning rate of Adam, for logarithms of stretches and for means in
            standard deviations; angles have a part of it.
        place: a file that holds how far a run has come, so that a killed one goes on.
        identity: a run goes on from a file of this identity alone.
    """
    run = _Run(Network(config, params, spec), starting_from(calibration, spec, config.layers), text)
    rule = _adam(rate, steps, config.head_dim)
    state = kept(place, identity, run.abstract_state(rule))
    if state is None:
        state = run.first_state(rule)
    else:
        note(f"It was begun before: going on after step {state.step}")
    with count_bar(_label(state), steps) as bar:
        bar.reach(state.step)
        while state.step < steps:
            state, reason = run.advance(rule, state, min(CHECK_EVERY, steps - state.step), bar)
            if reason is not None:
                note(f"Stopped: {reason}; the best so far, of step {state.best_step}, is kept")
                break
            keep(place, identity, state)
    if state.best_step == 0:
        note("Nothing was learned that is better than the start, which is kept")
    found = with_learned(calibration, spec, run.start, state.best)
    return Outcome(found, float(state.start_kl), float(state.best_kl), int(state.best_step))


@dataclass(frozen=True)
class _Run:
    network: Network
    start: dict[str, Start]
    text: Text

    def abstract_state(self, rule: optax.GradientTransformation) -> State:
        """A state of the right form."""
        learned = unchanged(self.start)
        return State(0, learned, rule.init(learned), learned, 0, 0.0, 0.0, 0)

    def first_state(self, rule: optax.GradientTransformation) -> State:
        """Nothing is learned yet; refuses a text on which the start is not finite."""
        state = self.abstract_state(rule)
        with spinner("Measuring the start"):
            kl = self.checked(state.learned)
        if not 0 < kl < math.inf:
            raise UserError(
                f"the KL of the start is {kl:.3g}: nothing can be learned from it; calibrate "
                "without --learn, and see `jkvq eval ppl`"
            )
        return state._replace(best_kl=kl, start_kl=kl)

    def checked(self, learned: Sides) -> float:
        """The KL on what is held out."""
        layers = turned_layers(self.start, learned)
        return float(np.mean([self.network.kl(layers, each) for each in self.text.checks()]))

    def advance(
        self, rule: optax.GradientTransformation, state: State, steps: int, bar: Bar
    ) -> tuple[State, str | None]:
        """The state after so many steps and a check; and why it must stop, if it must."""
        learned, optimizer, part = state.learned, state.optimizer, 0.5**state.halvings
        for step in range(state.step, state.step + steps):
            layers = turned_layers(self.start, learned)
            windows, typical = self.text.batch_of(step), state.start_kl
            kl, gradient = self.network.kl_and_gradient(layers, windows, typical)
            learned, optimizer = _updated(rule, self.start, learned, optimizer, gradient, part)
            if not math.isfinite(kl):
                return state, f"the KL of step {step + 1} is not a number"
            bar.reach(step + 1)
        found, step = self.checked(learned), state.step + steps
        state = state._replace(step=step, learned=learned, optimizer=optimizer)
        if found < state.best_kl:
            state = state._replace(best=learned, best_step=step, best_kl=found)
        bar.rename(_label(state))
        if found <= _ASTRAY * state.start_kl:
            return state, None
        astray = f"after step {step} the KL is {found:.3g}, and was {state.start_kl:.3g}"
        if state.halvings == _HALVINGS:
            return state, astray
        note(f"Going on from step {state.best_step} at half the rate: {astray}")
        return state._replace(learned=state.best, halvings=state.halvings + 1), None


def _label(state: State) -> str:
    best = f", {state.best_kl:.3g} now" if state.best_step else ""
    return f"Learning: KL {state.start_kl:.3g} at the start{best}"


def _adam(rate: float, steps: int, head_dim: int) -> optax.GradientTransformation:
    """Adam whose rate rises at first and then falls to 0 as a cosine does; less for angles."""
    warm_up = max(1, round(_WARM_UP * steps))
    falling = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, max(steps, warm_up + 1))
    part = min(1.0, _TURN / head_dim)

    def slower_angles(updates: Sides, _) -> Sides:
        return {
            name: side._replace(before=part * side.before, behind=part * side.behind)
            for name, side in updates.items()
        }

    return optax.chain(
        optax.scale_by_adam(b2=0.99),
        optax.stateless(slower_angles),
        optax.scale_by_learning_rate(falling),
    )


@jax.jit
def turned_layers(start: dict[str, Start], learned: Sides) -> Layers:
    """What the cache of every layer does to tokens."""
    every = {name: turned(start[name], learned[name]) for name in start}
    layers = len(start["key"].mean)
    return [jax.tree.map(lambda x, i=i: x[i], every) for i in range(layers)]


@functools.partial(jax.jit, static_argnums=0)
def _updated(rule, start: dict[str, Start], learned: Sides, optimizer, gradient: Layers, part=1.0):
    """What is learned after a step, whose gradient is by layers' matrices and means.

    ``part`` of what the rule would change.
    """
    back = jax.vjp(lambda learned: turned_layers(start, learned), learned)[1]
    with jax.numpy_dtype_promotion("standard"):  # as Optax has it
        updates, optimizer = rule.update(back(gradient)[0], optimizer, learned)
    return jax.tree.map(lambda x, change: x + part * change, learned, updates), optimizer
