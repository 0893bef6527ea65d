"""The parts of a decoder's layer, as Flax modules."""
