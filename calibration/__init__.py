"""Offline calibration of caches: statistics of a text, what methods make of them, artefacts."""
