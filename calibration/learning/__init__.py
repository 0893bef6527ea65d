"""Calibrations learned through the model: what the next token's distribution loses, made less."""
