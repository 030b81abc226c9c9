"""GPUs: streams and copies, and stores with windows in device memory or copies to and from host memory."""
