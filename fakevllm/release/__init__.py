"""Decisions about releases: which arm a session belongs to, and what learning and choosing gained.

* `arms` assigns each session to an arm: the newest weights, the released ones, or the baseline.
* `arm_gains` estimates from live sessions how much the newest weights are better than the baseline,
  and how much is gained by serving the best sibling.

The folder is pure: no I/O, no clock, no random numbers. It starts no task and opens no socket.
"""
