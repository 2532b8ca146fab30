"""HTTP interface of the swarm server: its ASGI app, routes, roles, and the state of a running
server.

    app.py                   the ASGI app: routes, access checks, start and stop
    http_server.py           the process's HTTP server
    server_state.py          the state of a running server; starts and stops the engine
    open_run.py              the run that the server has open: journal, run log, checkpoints
    routes/                  one module for each group of routes
    pool_view.py             the batch that is being collected, as clients see it
    stored_responses.py      answers in the Responses format, for later requests
    latest_call_recorder.py  the latest answered model call, for admins
    verbose_log.py           short messages that clients show each other
    uploaded_code.py         training code that a client uploads

Routes act only through `ServerState`. No route decides what is trained.
"""
