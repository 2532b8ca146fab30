"""Decisions about releases of weights. They answer three questions: which versions of the weights
may answer apps, to which arm a session belongs, and how much reward was gained. An arm is a share
of the sessions. Its sessions are answered by the newest weights, the released weights or the
baseline.

* `actions` lists the possible next actions of the release gate.
* `controller` decides which version is evaluated, and whether the version is released or rejected.
* `between_steps` makes the decisions of `controller` for an engine that holds only one set of
  weights.
* `held_out_draws` chooses the held-out rows of an evaluation.
* `arms` assigns each session to an arm.
* `arm_gains` estimates two gains in reward from live sessions: the gain of the newest weights over
  the baseline, and the gain by serving the best of the sampled answers to a request.
* `evidence_text` writes the versions and the figures of decisions as text.

The folder is pure: no I/O, no clock, no random numbers. The code starts no task and opens no
socket. The server's journal keeps the decisions. The proxy's ledger (its database) keeps the
evaluated rows and the sessions. After a restart, the objects of this folder are therefore created
again from the journal and the ledger.
"""
