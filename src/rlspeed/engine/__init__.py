"""The shared core: torch and torch.distributed."""
