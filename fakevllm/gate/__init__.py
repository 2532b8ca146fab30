"""Let apps use older versions of the weights beside the newest version. The folder `release` makes
the decisions about versions. This folder sends the decisions to the server.

* `arm_policies` keeps the version of each arm loaded. An arm is a share of the sessions that one
  version answers.
* `release_gate` evaluates candidates, and sends decisions to the server. A candidate is a version
  that may be released.
* `compared_versions` opens the evaluations that compare a candidate with the released version.
* `held_out_evaluation` samples the held-out rows of an evaluation.
* `live_sessions` computes one outcome (a mean reward) for each session of an app.
* `loaded_versions` decides when the versions of an ended evaluation are unloaded.
* `training_limit` removes a limit that an earlier proxy process has left at the server. The limit
  is the newest version that training may make.

If a version cannot be loaded or sampled, requests of apps still get an answer. The proxy process
may die at any time. The server's journal (its database) keeps the decisions. Each decision follows
from evaluated rows. These rows are written to the ledger (the proxy's database) before the gate
sends the decision.
"""
