"""Decisions about releases. They answer three questions: which versions of the weights may answer
apps, to which arm a session belongs, and how much reward was gained by training and by choosing the
best sibling.

* `actions` lists the actions that the release gate can have to do.
* `controller` decides which version is evaluated, and whether the version is released or rejected.
* `between_steps` makes the same decisions for an engine that holds one set of weights.
* `held_out_draws` chooses the held-out rows of an evaluation.
* `arms` assigns each session to an arm. The newest weights, the released weights or the baseline
  answer the sessions of an arm.
* `arm_gains` estimates from live sessions how much better the newest weights are than the baseline,
  and how much is gained by serving the best sibling.
* `evidence_text` writes the figures of a decision as text.

The folder is pure: no I/O, no clock, no random numbers. The code starts no task and opens no
socket. The server's journal keeps the decisions. The proxy's ledger keeps the evaluated rows and
the sessions. The objects can therefore be created again after a restart.
"""
