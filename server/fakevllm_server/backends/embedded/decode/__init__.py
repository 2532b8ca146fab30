"""The sampler of the embedded engine: batched decoding of one model on one thread.

A reported log-probability is that of the distribution that the token was drawn from, and does not
depend on the other requests of the batch. Except for `chat_renderer` and `grammar`, which the
asyncio side also calls, everything runs on the engine thread. Nothing here trains.
"""
