"""Hooks: the user's own functions, run in a process of their own. The contract is spec.py."""
