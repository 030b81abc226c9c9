"""GPU streams and copies, and stores for models on a GPU whose shards are in device or host memory."""
