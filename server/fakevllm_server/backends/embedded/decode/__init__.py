"""The sampler of the embedded engine: batched decoding of one model on one thread, without
training.

The reported log-probability of a token belongs to the distribution from which the token was
sampled. Except for rounding, this log-probability does not depend on the other requests of the
batch. Decoding runs on the engine thread. Requests are checked and rendered to token ids on other
threads.
"""
