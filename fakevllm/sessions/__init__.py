"""Sessions: which conversation a request belongs to, and where in it the request stands.

The place of a request is derived from the request itself: from its ids and headers if the client
sends any, else from the history that it repeats. The memory of the session tree is bounded. An
error in this folder never reaches the app: the request then has no place. Nothing is ever matched
across the keys of two apps. Nothing here does I/O; the ledger restores the tree.
"""
