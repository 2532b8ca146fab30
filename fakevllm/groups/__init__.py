"""The path of an app's request, from admission to the record in the ledger. The answers that are
sampled for one request are its siblings. A group is a request with all its siblings. The lead is
sibling 0. It is sampled with the app's own, unchanged request.

* `request_admission` decides whether a request is trained.
* `request_pipeline` relays one answer, or runs a group of siblings with `group_executor`.
* `group_executor` carries out the decisions of `sibling_scheduler`, a state machine without I/O.
* `sampler` calls the engine, `scoring` calls the reward hook, and `sibling_selection` chooses the
  sibling to serve.
* `hook_warnings` logs failures of hooks, and `hook_failures` counts them.
* `group_record` builds the group's row for the ledger.
* `resend_cache` answers retries of a request with the answer to the first attempt.
* `evaluator` samples and scores a held-out row.
* `request_arms` assigns each request to an arm. The arm decides which weights answer the request.
* `reproducible_lockstep` runs groups one after another. This makes a run reproducible.

Every request gets exactly one answer or error, even if a hook, the engine or code of the proxy
fails. Every group ends exactly once. This folder does not send rewards to the server; the folder
`settlement` does.
"""
