"""The path of an app's request: from admission to the record of its group.

`pipeline` plans each request. It relays one answer, or runs a group of siblings through `executor`.
The executor carries out the decisions of `scheduler`, a pure state machine. `sampler` calls the
engine, `scoring` calls the reward hook, and `selection` chooses the sibling to serve. `record`
collects the group's ledger record. `resend_cache` answers requests that a client sends again,
`traffic_gate` decides which requests train, and `lockstep` makes runs reproducible.

Every app gets exactly one answer or error, even if a hook, the engine or the proxy fails. Every
group ends exactly once. This folder never sends rewards to the server; `settlement` does.
"""
