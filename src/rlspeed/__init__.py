"""rlspeed: fast RLHF training of language models."""

__version__ = "0.1.0"
