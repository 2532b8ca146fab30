"""`fakevllm eval`: sample held-out rows, score them with the proxy's hooks, and draw a table.

The command runs beside the proxy, as `fakevllm replay` does. For each row, the command sends a
request to the proxy's route /fakevllm/eval. The proxy samples the row several times and scores all
samples with the user's reward hook. The proxy also stores the samples in its ledger (its database)
with the kind `eval`, and returns the rewards. These samples are never trained. `results` computes
means, intervals and comparisons from the rewards, without I/O.
"""
