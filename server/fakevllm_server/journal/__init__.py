"""The journal: one SQLite file with all acknowledged requests and their later states (README.md).

Other folders use `store`: put a change, wait until it is on disk, and read. One thread writes. No
module here makes a decision about training.
"""
