"""Families of models: what sets each apart from llama, beside the shared decoder."""
