"""Generators: from prompts to answers."""
