"""Streams and copies of a GPU, and stores for models on a GPU with shards in device memory or in host memory."""
