"""The trainer of the embedded engine, which runs policy-gradient steps of one model.

The gradient of a step is the exact gradient of its loss. It does not depend on how the batch is cut
into pieces, or on whether calls share prefixes. Before a step trains, it checks that its token ids
are those that the rollout engine has sampled. Only the module `standalone_trainer`, which runs the
trainer without a sampler, uses asyncio. No module uses HTTP or a tokenizer.
"""
