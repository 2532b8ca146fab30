"""The trainer of the embedded engine, which runs policy-gradient steps of one model.

A step's gradient is the exact gradient of the step's loss. The gradient depends neither on how the
batch is cut into pieces nor on whether calls share prefixes. Before a step trains, it
checks that the token ids that it computes with are those that the engine has sampled. Only the
module `standalone_trainer`, which runs the trainer without a sampler, uses asyncio. No module uses
HTTP or a tokenizer.
"""
