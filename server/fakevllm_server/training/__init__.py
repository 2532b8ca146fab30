"""The training loop: groups and episodes from clients become batches, steps, checkpoints and served
weights.

`submission_intake` accepts calls, groups and episodes. `loop` moves the engine from state to state,
`step` makes one training step from a `step_plan`, `checkpointing` saves it, and `publisher` serves
the new weights. Only `loop` changes the engine's status. Only this folder decides what is trained.

A request is acknowledged only after its change is in the journal. No module here imports torch or
an engine.
"""
