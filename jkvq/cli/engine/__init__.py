"""The commands that run the engine: `jkvq chat`, `jkvq batch` and `jkvq bench`."""
