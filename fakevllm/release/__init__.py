"""Decisions about releases. They answer three questions: which versions of the weights may answer
apps, to which arm a session belongs, and how much reward was gained by training and by choosing the
best sibling.

* `controller` decides which version is evaluated, and whether it is released or rejected.
* `held_out_draws` chooses the held-out rows of an evaluation.
* `arms` assigns each session to an arm: the newest weights, the released ones, or the baseline.
* `arm_gains` estimates from live sessions how much the newest weights are better than the baseline,
  and how much is gained by serving the best sibling.
* `evidence_text` writes the figures of a decision as text.

The folder is pure: no I/O, no clock, no random numbers. It starts no task and opens no socket. The
server's journal keeps the decisions, and the proxy's ledger keeps the evaluated rows and the
sessions, so the objects can be created again from them.
"""
