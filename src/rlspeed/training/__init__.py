"""The roles, the step, the loop, checkpoints and metrics."""
