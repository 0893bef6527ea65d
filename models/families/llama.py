"""Llama and Mistral, which the others are told from."""

from jkvq.models.families.family import Family, GGUFForm

LLAMA = Family("llama", gguf=GGUFForm("llama", interleaved=True))
MISTRAL = Family("mistral")  # llama.cpp calls it llama
