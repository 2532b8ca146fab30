"""Forests of calls through a torch model: each token computed once, each trained exactly."""
