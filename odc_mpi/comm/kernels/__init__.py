"""CUDA kernels of `src`, called from Python, and torch operators that replace them."""
