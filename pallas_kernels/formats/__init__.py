"""How tokens are coded and packed, in plain JAX: what every backend reads and writes."""
