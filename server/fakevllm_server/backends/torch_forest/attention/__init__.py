"""Methods that compute attention over a forest (calls as trees of tokens), and the choice of a
method.

    registry.py           the table ATTENTIONS, and the fastest method for a set of calls
    transformers_hook.py  the attention implementation that transformers calls
    chain_attention.py    for CPUs
    segment_attention.py  for any device, and for layers with an attention window
    flex.py               for CUDA: FlexAttention
    dense.py              one mask of nodes times nodes; the reference for tests
    padded_rows.py        no sharing: each call is a row of its own

A method is a function of a model and a plan (the forest as tensors). It returns the hidden states
from which the LM head predicts the trained tokens.
"""
