"""The journal is one SQLite file. It records every request that the server has acknowledged, and
the outcome of the request (see README.md).

Other folders use the module `store` to queue changes, to wait until the changes are on disk, and to
read. Only one thread writes. No module of this folder makes a decision about training.
"""
