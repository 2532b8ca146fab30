"""The ledger: the proxy's SQLite file. The ledger has every request and the request's siblings,
which are the answers that were sampled for it. It also has the siblings' rewards, and the state of
training: which siblings were trained.

README.md describes the tables, the states and the reasons. Recording a change never waits and never
raises. A separate thread writes the changes. A change that cannot be written is dropped, counted
and logged. The ledger does not decide what is trained. It only records what the server has trained,
according to the server's run log.

Rows are never deleted, with one exception: an answer that was kept for a retry of its request. If
an app sends a DELETE request for a stored response, the response's row stays, and the row's column
`body` is emptied.
"""
