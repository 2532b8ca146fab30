"""Reward hooks that are ready to copy. Each file can be read without the other files."""
