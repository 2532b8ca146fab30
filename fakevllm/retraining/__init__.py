"""Train the logged groups of a ledger again, with the rewards of other hooks. A group is a request
with the answers that were sampled for it. The command `fakevllm retrain` samples no new answers.

command.py            the command `fakevllm retrain`
source_run.py         the run that sampled the groups: its model and its checkpoints
group_reader.py       a logged group with its tokens and new rewards
token_check.py        whether the tokens of the ledger are those of the new run's model
server_calls.py       the requests to the new run's server
group_feeder.py       send groups step by step
sample_size_limit.py  decide when the effective sample size is too low
report.py             effective sample size, staleness, and the table for the terminal

The server of the new run plans the steps and trains the groups (fakevllm_server/training).
"""
