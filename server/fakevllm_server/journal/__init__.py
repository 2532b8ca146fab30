"""The journal: one SQLite file that records every request which the server has acknowledged, and
what became of it (see README.md).

Other folders use the module `store` to queue changes, to wait until these are on disk, and to read.
Only one thread writes. No module of this folder makes a decision about training.
"""
