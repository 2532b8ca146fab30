"""The path of an app's request: from admission to the record of its group. The group of a request
consists of its siblings, which are the answers sampled for it. The lead is sibling 0, whose request
is the app's own.

`request_pipeline` plans each request. It relays one answer, or runs a group of siblings through
`group_executor`. The executor carries out the decisions of `sibling_scheduler`, a pure state
machine. `sampler` calls the engine, `scoring` calls the reward hook, and `sibling_selection`
chooses the sibling to serve. `group_record` collects the group's ledger record. `resend_cache`
answers requests that a client sends again, `request_admission` decides which requests train, and
`reproducible_lockstep` makes runs reproducible.

Every request gets exactly one answer or error, even if a hook, the engine or the proxy fails. Every
group ends exactly once. This folder never sends rewards to the server; `settlement` does.
"""
