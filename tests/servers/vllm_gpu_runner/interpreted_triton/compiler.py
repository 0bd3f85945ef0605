"""What Triton wants beside a driver. Nothing is compiled."""

from triton.backends.nvidia.compiler import CUDABackend as CUDABackend
