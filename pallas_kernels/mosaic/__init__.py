"""Kernels written for Hopper's tensor cores, warp by warp (Pallas: Mosaic GPU)."""
