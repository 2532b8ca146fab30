"""Forward passes of calls through a torch model, arranged as a forest (trees of tokens).

Calls that begin with the same tokens share these tokens, so each shared token is computed once.
Each call gets the same log-probabilities and gradients as in a forward pass of this call alone. If
sharing could change the results of a model, its calls do not share tokens. The results are
therefore never approximate. The modules of this folder know nothing of jobs and losses. README.md
explains the method.
"""
