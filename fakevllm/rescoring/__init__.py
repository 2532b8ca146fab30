"""Run other hooks over the logged groups, and compare the new rewards with the old rewards. A group
is a request with the answers that were sampled for it. The command `fakevllm rescore` does this for
many groups. A running proxy does this before edited hooks take over.

command.py        the command `fakevllm rescore`
logged_groups.py  a group in the form in which hooks get it
rescorer.py       run the hooks over the groups, in several processes
comparison.py     compare the new rewards with the old ones
table.py          the comparison as a table for the terminal
hook_trial.py     run edited hooks over the latest groups of a running proxy
reload_rules.py   decide whether edited hooks take over
hook_reloader.py  load edited hooks, try them, and let them take over

No module in this folder calls the model or trains it. `fakevllm rescore` keeps the new rewards in
the ledger's table `rescored`, and never changes the old rewards.
"""
