"""What the pages read: replies of the proxy and the server, and results from the ledger.

shared_reply.py        a reply of another program that all pages share
proxy_status.py        the status of the proxy, fetched once for all pages
proxy_settings.py      the settings of the proxy, and the job of the server
server_releases.py     the history of releases, and decisions about them
evaluation_results.py  the results of evaluations, from the evaluated rows of the ledger
held_out_results.py    the results on held-out rows of one run
shared_evaluations.py  keep the results of evaluations for all open pages
curve_points.py        keep the points of a learning curve for all open pages
server_status.py       the status of the server, fetched once for all pages
engine_loads.py        the load of each engine, parsed from their metrics
token_texts.py         the texts of token ids, from the engine
dataset_rows.py        the dataset's row to which a request belongs
"""
