"""Sessions: the conversations of apps. This folder finds the session of each request, and the
request's place in the session. A place consists of three parts: the parent, the number of the turn,
and the kind of request. The parent is the earlier request whose answer this request continues.

The place is found from the request itself. Ids or headers that identify the session are used if the
client sends them. Otherwise the place is found from the message history that the request repeats.

A request is matched only with requests that used the same API key. The size of the session tree is
bounded. After a restart of the proxy, the tree is restored from the ledger, the proxy's database.
This folder does no I/O. If an error occurs in the code of this folder, the app still gets its
answer, and the request has no place.
"""
