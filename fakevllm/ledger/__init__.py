"""The ledger: the proxy's SQLite file. The ledger has every request and the request's siblings,
which are the answers that were sampled for it. It also has the siblings' rewards, and the state of
training: which siblings were trained.

README.md describes the tables, the states and the reasons. Recording a change never waits and never
raises. A separate thread writes the changes. A change that cannot be written is dropped, counted
and logged. The ledger does not decide what is trained. It only records what the server has trained,
according to the server's run log.

What an app sent or got is deleted only in three cases. An answer that was kept for a retry of its
request is deleted when it is no longer needed. If an app sends a DELETE request for a stored
response, the column `body` of the response's row is emptied. `fakevllm forget` and the retention
delete the texts and token ids of groups (requests with their siblings).
"""
