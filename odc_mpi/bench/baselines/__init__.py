"""What the runtime is compared with: plain torch, FSDP2, gloo, torch.distributed.checkpoint."""
