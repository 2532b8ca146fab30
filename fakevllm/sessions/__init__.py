"""Sessions: which conversation a request belongs to, and where in it the request stands.

The place of a request is derived from what the request contains: ids and headers if the client
sends any, else the history that it repeats. The folder promises a place in memory that is bounded,
and that trouble never reaches the app: a request that cannot be placed has no place. Nothing is
ever matched across the keys of two apps. Nothing here does I/O; the ledger restores the tree.
"""
