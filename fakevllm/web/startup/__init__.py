"""Start the parts of a proxy. Each module starts the parts of one subject. A part that must be
closed is registered with the proxy's exit stack, so parts are closed in reverse order.

shared_parts.py the ledger, the hooks, the connection to the server: all other parts need these
datasets.py     the rows of the training dataset and the held-out rows
hooks.py        the process of the user's hooks
hook_reloads.py the objects that reload the hooks
settlement.py   rewards and users' feedback
arms.py         the assignment of sessions to arms
gate.py         the release gate
guard.py        the guard, which notices when training goes wrong
forgetting.py   deletion of texts and token ids
gauges.py       the gauges about the proxy's own load
"""
