"""`fakevllm rescore`: run other hooks over the logged groups, and compare the new rewards with the
old rewards. A group is a request with the answers that were sampled for it.

command.py        the command
logged_groups.py  a group in the form in which hooks get it
rescorer.py       run the hooks over the groups, in several processes
comparison.py     compare the new rewards with the old ones
table.py          the comparison as a table for the terminal

The command never asks the model and never trains. It keeps the new rewards in the ledger's table
`rescored`, and never changes the old rewards.
"""
