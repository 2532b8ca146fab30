"""Sessions: the conversations of apps. This folder finds the session of each request and its place
in the session. The place consists of the parent (the group whose answer the request continues), the
number of the turn, and the kind of request.

The place of a request is derived from the request itself: from its ids and headers if the client
sends any, else from the history that the request repeats. A request is matched only with requests
of the same API key. The size of the session tree is bounded. After a restart, the tree is restored
from the ledger. This folder does no I/O. If an error occurs in this folder, the app still gets its
answer, and the request has no place.
"""
