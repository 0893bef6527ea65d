"""How a warp reads one side of a tile, keys or values, by its format."""
