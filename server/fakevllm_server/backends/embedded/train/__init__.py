"""The trainer of the embedded engine. It runs policy-gradient steps of one model.

The gradient of a step is the exact gradient of its loss. The gradient does not depend on how the
batch is cut into pieces, or on prefixes that calls share. Before a step trains, the trainer checks
that its token ids are those that the rollout engine has sampled. Only the module
`standalone_trainer`, which runs the trainer without a sampler, uses asyncio. No module uses HTTP or
a tokenizer.
"""
