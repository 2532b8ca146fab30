"""Delete texts and token ids from the ledger, and from the server's journal: `fakevllm forget`, and
the retention of old groups.

messages.py        the request to a running proxy, and the report
forgetter.py       delete contents through the ledger's writer, in slices
retention_rules.py decide which groups are pruned
retention.py       prune old groups in the background
server_requests.py ask the server to delete its captured calls, also later
command.py         the command, with and without a running proxy

Rows of numbers (rewards, counts, versions, states) stay, so that learning curves stay the same.
Dataset tasks stay. A group whose rewards the server has not acknowledged is waited for, and never
deleted.
"""
