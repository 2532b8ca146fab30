"""`fakevllm demo`: a tiny model learns to add. The demo runs the same processes and makes the same
HTTP calls as a real training run with a user's app.

The demo starts a server and a proxy, and restarts them if they die. It sends sums through the proxy
as an app would, and measures the model's accuracy before and after with fixed questions. A run can
be resumed. The control experiments (`--control frozen`, `--control shuffled`) must not learn. The
demo reads and changes the state of the server and the proxy only through their public routes.
"""
