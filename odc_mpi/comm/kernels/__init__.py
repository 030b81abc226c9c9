"""Python over the CUDA kernels of `src`, and torch operators in their place."""
