"""The embedded engine: torch samples and trains one model in one child process.

Importing this package loads no torch. See README.md for models, promises and limits.
"""
