"""Many requests at once: lines of a file or items of an iterable, and an answer to each."""
