"""The embedded engine: one child process in which torch samples and trains one model.

Importing this package does not import torch. README.md lists the supported models, the guarantees
and the limits.
"""
