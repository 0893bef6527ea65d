"""What changes the scores of some sequences before a token is drawn from them.

It takes memory and time by the vocabulary, so it is there only while somebody asks for it.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkvq.engine.drawing.grammar import words
from jkvq.engine.sampling import SamplerArrays, Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjust:
    """The `logit_bias` of each sequence, what its penalties count, and what its grammar allows.

    The scores of a sequence that asks for none of it stay what they are, to the bit.
    """

    bias: Float[Array, "B V"]
    count: Float[Array, "B V"]  # how often each token is in the text
    allowed: Int[Array, "B W"]  # a bit for each token

    @classmethod
    def start(
        cls, rows: Sequence[Sampling], allowed: Int[np.ndarray, "B W"], vocab: int
    ) -> "Adjust":
        """Of sequences that have drawn nothing."""
        bias = np.zeros((len(rows), vocab), np.float32)
        for row, sampling in enumerate(rows):
            for token, value in sampling.logit_bias.items():
                bias[row, token] = value
        return cls(*map(jax.device_put, (bias, np.zeros_like(bias), allowed)))

    def added(self, sampler: SamplerArrays) -> Float[Array, "B V"]:
        """What the scores get before a token is drawn."""
        often = sampler.frequency_penalty[:, None] * self.count
        ever = jnp.where(self.count > 0, sampler.presence_penalty[:, None], 0.0)
        token = jnp.arange(self.bias.shape[1])
        bit = jax.lax.shift_right_logical(
            self.allowed[:, token // 32], jnp.broadcast_to(token % 32, self.bias.shape)
        )
        return jnp.where(bit & 1 == 1, self.bias - often - ever, -jnp.inf)

    def counted(self, token: Int[Array, " B"], active: Bool[Array, " B"]) -> "Adjust":
        """With one token more of each active sequence."""
        row = jnp.arange(len(token))
        return dataclasses.replace(
            self, count=self.count.at[row, token].add(active.astype(jnp.float32))
        )


def all_allowed(rows: int, vocab: int) -> Int[np.ndarray, "B W"]:
    """Bits of sequences without a grammar."""
    return np.full((rows, words(vocab)), -1, np.int32)
