"""`fakevllm eval`: sample held-out rows, score them with the proxy's hooks, and draw a table.

The command runs beside the proxy, as `fakevllm replay` does. It sends each row to the proxy's route
/fakevllm/eval. The proxy samples the row several times, scores all samples with the user's reward
hook, stores them in its ledger with the kind `eval`, and returns the rewards. Nothing of it is ever
trained. `results` is pure: it makes means, intervals and comparisons of the rewards.
"""
