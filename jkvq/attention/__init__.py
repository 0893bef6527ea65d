"""Attention over the cache: new tokens are stored, queries read, by kernels or plain JAX."""
