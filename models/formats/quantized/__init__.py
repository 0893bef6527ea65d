"""Quantized safetensors checkpoints, dequantized at load."""
