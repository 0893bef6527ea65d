"""How a cache is stored, as a value: the spec, the named ones, and how users write them."""
