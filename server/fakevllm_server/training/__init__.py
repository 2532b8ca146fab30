"""The training loop: groups and episodes from clients become batches, steps, checkpoints and served
weights.

`submission_intake` accepts calls, groups and episodes. `loop` moves the engine from state to state.
No other module changes the state. `step_plan` computes the advantages of a step, and `step` carries
out the step. `stopped_step` says which groups a step that stopped half way has not trained.
`forget_service` deletes captured calls, and `call_retention` chooses old calls for deletion.
`checkpointing` saves the weights, and `publisher` serves them. Only this folder decides what is
trained.

A request is acknowledged only after its change is in the journal, which is the server's SQLite
file. No module here imports torch or an engine.
"""
