"""`fakevllm tokens`: show the tokens of a group or an episode as the trainer sees them.

A group is a request with its answers. Each token is shown with its text and its log-probability.
Trained tokens also have their advantage.
"""
