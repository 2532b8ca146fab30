"""The embedded engine: torch samples and trains in one child process. Importing this loads no
torch.
"""
