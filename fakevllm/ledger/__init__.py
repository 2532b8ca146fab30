"""The ledger: one SQLite file with every request, its siblings, their rewards and their training.

README.md describes the tables, the states and the reasons. Recording never waits and never raises:
one thread writes, and a change that cannot be written is dropped, counted and logged. The ledger
does not decide what is trained. It only records which groups the server trained, as the server's
run log reports. Rows are never deleted, except answers that were kept for a retry.
The body of a response is deleted if its app sends a DELETE request.
"""
