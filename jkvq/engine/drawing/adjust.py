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

from jkvq.engine.sampling import SamplerArrays, Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjust:
    """The `logit_bias` of each sequence, and what its penalties count.

    The scores of a sequence that asks for none of it stay what they are, to the bit.
    """

    bias: Float[Array, "B V"]
    count: Float[Array, "B V"]  # how often each token is in the text

    @classmethod
    def start(cls, rows: Sequence[Sampling], vocab: int) -> "Adjust":
        """Of sequences that have drawn nothing."""
        bias = np.zeros((len(rows), vocab), np.float32)
        for row, sampling in enumerate(rows):
            for token, value in sampling.logit_bias.items():
                bias[row, token] = value
        return cls(jax.device_put(bias), jax.device_put(np.zeros_like(bias)))

    def added(self, sampler: SamplerArrays) -> Float[Array, "B V"]:
        """What the scores get before a token is drawn."""
        often = sampler.frequency_penalty[:, None] * self.count
        ever = jnp.where(self.count > 0, sampler.presence_penalty[:, None], 0.0)
        return self.bias - often - ever

    def counted(self, token: Int[Array, " B"], active: Bool[Array, " B"]) -> "Adjust":
        """With one token more of each active sequence."""
        row = jnp.arange(len(token))
        return dataclasses.replace(
            self, count=self.count.at[row, token].add(active.astype(jnp.float32))
        )
