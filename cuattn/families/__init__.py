"""Kernel families of the CUDA backend: each says what it refuses and builds programs. No device calls."""
