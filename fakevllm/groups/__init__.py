"""The path of an app's request, from admission to the record in the ledger. A group consists of the
siblings of one request, which are the answers sampled for it. The lead is sibling 0. Its request is
the app's own, unchanged.

`request_pipeline` plans each request. It relays one answer, or it runs a group of siblings with
`group_executor`. The executor carries out the decisions of `sibling_scheduler`, a state machine
without I/O. `sampler` calls the engine, `scoring` calls the reward hook, and `sibling_selection`
chooses the sibling to serve. `group_record` builds the group's row for the ledger. `resend_cache`
answers requests that a client sends again, `request_admission` decides which requests train, and
`reproducible_lockstep` makes runs reproducible.

Every request gets exactly one answer or error, even if a hook, the engine or the proxy fails. Every
group ends exactly once. This folder never sends rewards to the server; the folder `settlement`
does.
"""
