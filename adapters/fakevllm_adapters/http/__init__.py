"""HTTP at the level of ASGI: requests, responses, access checks and limits, without a framework.

Before any route runs, `access_guard` checks a request's host, origin and API key, and the number of
concurrent calls. `access_guard` also limits the size of the body. `limits` and `client_body` limit
the work that one request may cause. Refused requests get errors in vLLM's form.

These modules await only the ASGI callables that they receive. They open no socket and start no
task.
"""
