"""The ops as Pallas:Triton kernels, for NVIDIA GPUs."""
