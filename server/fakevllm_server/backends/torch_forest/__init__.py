"""Forward passes of model calls through a torch model, arranged as a forest (trees of tokens).

If calls begin with the same tokens, each of these shared tokens is computed only once. The
log-probabilities and gradients of each call are the same as in a forward pass of this call alone.
If sharing could change the results of a model type, calls of this type share no tokens. The modules
of this folder do not depend on jobs or losses. README.md explains the method.
"""
