"""The windows of a text that a calibration learns from, and those that tell whether it does."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jkvq.cache.specs.spec import CacheSpec
from jkvq.calibration.learning.passes import Windows, first_that_reads_coded
from jkvq.calibration.observe import place_tokens
from jkvq.support.errors import UserError

_HELD_OUT, _MOST_HELD_OUT = 8, 16  # one window of so many, and no more than so many


@dataclass(frozen=True)
class Text:
    """The windows of a text, each a sequence of its own, and how many are taken at once.

    held_out: the last ones, which nothing is learned from.
    context: how many positions tokens are placed over, the first ``sink`` where they are.
    """

    windows: Int[np.ndarray, "n T"]
    held_out: Int[np.ndarray, "m T"]
    context: int
    sink: int
    batch: int
    seed: int

    def batch_of(self, step: int) -> Windows:
        """What is read in a step: all windows in turn, in an order of their own every time."""
        number = step * self.batch + np.arange(self.batch)
        count = len(self.windows)

        def chosen(number: int) -> int:
            turn, place = divmod(number, count)
            return int(np.random.default_rng([self.seed, turn]).permutation(count)[place])

        return self._placed(self.windows[[chosen(n) for n in number.tolist()]], number)

    def checks(self) -> Iterator[Windows]:
        """All that is held out, in batches of one size."""
        size = min(self.batch, len(self.held_out))
        for start in range(0, len(self.held_out) - size + 1, size):
            part = slice(start, start + size)
            yield self._placed(self.held_out[part], np.arange(len(self.held_out))[part])

    def _placed(self, tokens: Int[np.ndarray, "B T"], number: Int[np.ndarray, " B"]) -> Windows:
        T = tokens.shape[1]
        stand = [place_tokens(int(n), T, self.context, self.sink) for n in number]
        return Windows(jnp.asarray(tokens), jnp.asarray(np.stack(stand)))


def cut(
    tokens: Sequence[int],
    spec: CacheSpec,
    *,
    window: int,
    context: int,
    leading: int,
    batch: int,
    seed: int,
) -> Text:
    """A text cut into whole windows, which begin as `observe.sequences` do."""
    if first_that_reads_coded(spec, window) == window:
        least = spec.sink + spec.recent + spec.page
        raise UserError(
            f"window={window}: a cache that keeps {spec.sink} + {spec.recent} tokens in 16 bits "
            f"codes nothing of it; give at least {least}"
        )
    body = np.asarray(tokens[leading:], np.int32)
    count = len(body) // (window - leading)
    if count < 2:
        raise UserError(
            f"the text has {len(tokens)} tokens, and learning needs two windows of {window}: give "
            "a longer text or a smaller window"
        )
    rows = body[: count * (window - leading)].reshape(count, -1)
    first = np.broadcast_to(np.asarray(tokens[:leading], np.int32), (count, leading))
    every = np.concatenate([first, rows], axis=1)
    held = min(_MOST_HELD_OUT, -(-count // _HELD_OUT))
    held -= held % min(held, batch)  # in whole batches
    return Text(every[:-held], every[-held:], context, spec.sink, batch, seed)
