"""Measuring what caches do to a model."""
