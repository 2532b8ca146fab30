"""The versions of the weights that are in use beside the newest one, and the release gate. The
folder `release` decides, and this one carries the decisions out.

* `arm_policies` keeps the versions of the arms loaded.
* `release_gate` evaluates candidates, and sends decisions to the server.
* `held_out_evaluation` samples the rows of an evaluation, and `live_sessions` makes one outcome of
  each session of an app.
* `loaded_versions` decides when the versions of an ended evaluation are unloaded.

Trouble with a version never fails a request of an app. The server's journal keeps the decisions,
and the ledger keeps the evaluated rows before a decision that follows from them is sent, so the
process may die at any time.
"""
