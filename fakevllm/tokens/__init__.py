"""`fakevllm tokens`: the tokens of a group or an episode as training sees them.

Each token has its text, its log-probability, and its advantage if it was trained.
"""
