"""Reward hooks that are ready to copy. Each file works without the other files."""
