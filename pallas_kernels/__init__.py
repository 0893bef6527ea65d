"""The attention and cache ops: arrays in, arrays out. Nothing here knows of models or specs."""
