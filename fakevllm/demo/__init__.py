"""`fakevllm demo`: a tiny model learns to add. The demo runs the same processes and makes the same
HTTP calls as a real training run with a user's app.

The demo starts a swarm server and a proxy, and restarts them if they die. It sends sums through the
proxy as an app would. It measures the model's accuracy on fixed questions before and after
training. A run can be resumed. With the flag `--control frozen` or `--control shuffled`, the demo
is a control experiment in which the model must not learn. With the flag `--gated`, a version is
released only if it passes an evaluation on held-out sums. The flag `--plant-bad-step` makes ten
steps train with the opposite rewards. The demo reads and changes the state of the server and the
proxy only through their public HTTP routes. At the end, a gated demo also reads the sessions from
the ledger.
"""
