"""Notice when training goes wrong, and warn, hold releases, or go back.

* `answer_figures` measures the answers of a step: nearly identical siblings, equal answers to
  different questions, refusals, broken tool calls, and the agreement with a second judge.
* `trends` keeps the first and the latest values of a figure.
* `detectors` is the table of the detectors. Each of them reads trends.
* `detector_bank` feeds all detectors, and raises at most one alarm for each episode of trouble.
* `guard_state` is what the guard must remember over a restart.
* `guard_service` reads the run log and the ledger (the proxy's database), raises the alarms and
  carries out the actions.
* `alert_webhook` sends alarms to an address of the user.

All modules but the last two are pure: no I/O, no clock. Recorded metrics can therefore be fed to
the detectors. The memory of a detector has a bound. Nothing here delays or fails a request of an
app, and no alarm contains a text of an app.
"""
