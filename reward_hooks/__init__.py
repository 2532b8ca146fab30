"""Reward hooks that are ready to copy. Each file is complete without the other files."""
