"""RULER: needles, variables and words in prompts of any length, made by a seed."""
