"""The journal is one SQLite file with all acknowledged requests and their later states (see
README.md).

Other folders use the module `store` to put changes into the journal, to wait until these are on
disk, and to read. Only one thread writes. No module here makes a decision about training.
"""
