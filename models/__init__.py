"""Decoder-only language models in Flax: configurations, weights, tokenizers, the forward pass."""
