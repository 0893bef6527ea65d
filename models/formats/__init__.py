"""Checkpoints on disk: Hugging Face folders, GGUF files, our own, and how to fetch them."""
