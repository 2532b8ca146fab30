"""Forward passes of model calls through a torch model, arranged as a forest (trees of tokens).

If calls begin with the same tokens, each of these shared tokens is computed only once. Each call
gets the same log-probabilities and gradients as in a forward pass of this call alone. If sharing
could change the results of a model, the calls of this model share no tokens. The modules of this
folder do not depend on jobs or losses. README.md explains the method.
"""
