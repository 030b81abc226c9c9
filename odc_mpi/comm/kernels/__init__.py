"""Python interface to the CUDA kernels in `src/`, with torch operators as a fallback."""
