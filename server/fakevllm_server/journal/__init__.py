"""The journal: one SQLite file with what the server acknowledged and what became of it (README.md).

`store` is the way in: put a change, wait until it is on disk, read. One thread writes. Nothing here
decides anything about training.
"""
