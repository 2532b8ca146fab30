"""Reward hooks that are ready to copy. Each file can be read alone."""
