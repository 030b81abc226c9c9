"""Models whose linear layers have 4-bit weights in the format of bitsandbytes, over which adapters train (QLoRA)."""
