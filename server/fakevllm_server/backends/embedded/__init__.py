"""The embedded engine: torch samples and trains one model in one child process.

Importing this package does not import torch. README.md lists the supported models, the guarantees
and the limits.
"""
