"""What the pages read: replies of the proxy and the server, and results from the ledger.

shared_reply.py        a reply of another program that all pages share
proxy_status.py        the status of the proxy, fetched once for all pages
proxy_settings.py      the settings of the proxy, and the job of the server
server_releases.py     the history of releases, and decisions about them
evaluation_results.py  the results of evaluations, from the evaluated rows of the ledger
curve_points.py        keep the points of a learning curve for all open pages
"""
