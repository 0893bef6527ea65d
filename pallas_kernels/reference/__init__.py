"""The ops in plain JAX and float32, on any device."""
