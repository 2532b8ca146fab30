"""The ledger: the proxy's SQLite file. It has every request, the answers that were sampled for the
request (siblings), their rewards, and whether they were trained.

README.md describes the tables, the states and the reasons. Recording a change never waits and never
raises: a separate thread writes the changes, and a change that cannot be written is dropped,
counted and logged. The ledger does not decide what is trained. It only records what the server has
trained, as the server's run log reports.

Rows are never deleted, with one exception: an answer that was kept for a retry of its request. If
an app sends a DELETE request for a stored response, the row stays and its column `body` is emptied.
"""
