"""Forward passes over a forest of calls through a torch model.

Calls that begin with the same tokens share these tokens, so each shared token is computed once.
Each call gets the same log-probabilities and gradients as in a forward pass of this call alone. If
the results of a model could differ, its calls do not share tokens; the results are never
approximate. The folder uses neither jobs nor losses. README.md explains the method.
"""
