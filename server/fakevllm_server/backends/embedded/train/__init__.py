"""The trainer of the embedded engine: policy-gradient steps of one model.

The gradient is that of the step's loss, however the batch is cut and whether or not calls share
prefixes. A step first checks that its tokens are the sampled tokens. Nothing here knows HTTP,
tokenizers or asyncio, except `standalone_trainer`, which runs the trainer without a sampler.
"""
