"""Delete texts and token ids from the ledger (the proxy's database) and from the journal (the
server's database). `fakevllm forget` does this on request, and the retention task does this for old
groups. A group is a request with its sampled answers.

messages.py        the request to a running proxy, and the report
forgetter.py       delete contents in small changes, so that other records never wait long
retention_rules.py decide which groups are pruned
retention.py       prune old groups in the background
server_requests.py ask the server to delete its captured calls, and repeat failed requests
command.py         the command, with and without a running proxy

Rows of numbers (rewards, counts, versions, states) stay, so that learning curves stay the same.
Dataset tasks stay. A group is left unchanged as long as the server has not acknowledged the group's
rewards.
"""
