"""The rule by which calibrations are learned."""

import optax

_WARM_UP = 0.05  # of all steps


def adam(rate: float, steps: int) -> optax.GradientTransformation:
    """Adam whose rate rises at first and then falls to 0 as a cosine does."""
    warm_up = max(1, round(_WARM_UP * steps))
    falling = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, max(steps, warm_up + 1))
    return optax.adam(falling, b2=0.99)
