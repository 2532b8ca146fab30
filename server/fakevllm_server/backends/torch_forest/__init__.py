"""Forward passes over a forest of calls through a torch model.

Calls that begin with the same tokens share these tokens: each shared token is computed once, and
each call gets the log-probabilities and gradients that it would get alone. A model whose results
could differ is refused, never trained approximately. The folder knows neither jobs nor losses. See
README.md.
"""
