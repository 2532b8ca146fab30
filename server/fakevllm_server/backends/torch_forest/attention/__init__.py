"""Methods to compute attention over a forest (calls as trees of tokens), and the choice of a
method.

    registry.py           the table ATTENTIONS, and the fastest method for a piece
    transformers_hook.py  the attention implementation that transformers calls
    chain_attention.py             for CPUs
    segment_attention.py           for any device, and for layers with a window
    flex.py               for CUDA: FlexAttention
    dense.py              one mask of nodes times nodes; the reference for tests
    padded_rows.py               no sharing: calls one by one

A method is a function of a model and a plan (the forest as tensors). The function returns the
hidden states from which the LM head predicts trained tokens.
"""
