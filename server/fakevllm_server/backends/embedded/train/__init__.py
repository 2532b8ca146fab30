"""The trainer of the embedded engine. It runs policy-gradient steps of one model.

The gradient of a step is the exact gradient of its loss. The gradient does not depend on how the
batch is cut into pieces, or on which prefixes the calls share. Before each step, the trainer checks
that the token ids of the batch are those that the rollout engine has sampled. Only the module
`standalone_trainer`, which runs the trainer without a sampler, uses asyncio. No module uses HTTP or
a tokenizer.
"""
