"""Decisions about releases: which versions of the weights may answer apps.

* `controller` decides which version is evaluated, and whether it is released or rejected.
* `held_out_draws` chooses the held-out rows of an evaluation.

Both are pure: no I/O, no clock, no random numbers. The server's journal keeps the decisions, and
the proxy's ledger keeps the evaluated rows, so the controller can be created again from them.
"""
