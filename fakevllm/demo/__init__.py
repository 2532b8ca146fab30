"""`fakevllm demo`: a tiny model learns to add, with the same processes and the same HTTP calls that
a user's app would use.

The demo starts a server and a proxy, restarts them if they die, replays sums through the proxy, and
measures the model before and after with fixed questions. It promises that a run can be resumed and
that its controls (`--control frozen`, `--control shuffled`) do not learn. It never reads or changes
the state of the server or the proxy except through their public routes.
"""
