"""Sessions: the conversations of apps. This folder finds the session of each request and its place
in the session: the parent, whose answer it continues, the number of the turn, and the kind of
request.

The place of a request is derived from the request itself: from its ids and headers if the client
sends any, else from the history that the request repeats. The size of the session tree is bounded.
An error in this folder never reaches the app: the request then has no place. A request is matched
only with requests of the same API key. This folder does no I/O. The ledger restores the tree.
"""
