"""PyTorch's FSDP2 as a training engine."""
