"""The sampler of the embedded engine: batched decoding of one model on one thread.

The reported log-probability of a token belongs to the distribution from which the token was
sampled. The log-probability does not depend on the other requests of the batch. All modules run on
the engine thread. `chat_renderer` and `grammar` are also called from the event loop. This package
does not train.
"""
