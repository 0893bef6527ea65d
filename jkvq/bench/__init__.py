"""How fast things are on this machine: engines, and steps of a model."""
