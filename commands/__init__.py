"""The `rlspeed` command tree."""
