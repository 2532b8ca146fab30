"""HTTP at the level of ASGI: requests, responses, access checks and limits, without a web
framework.

Before any route runs, `access_guard` checks a request's host, origin and API key, the number of
open calls, and the size of the body. `limits` and `client_body` limit the work that one request may
cause. A refused request gets an error in vLLM's form.

The modules await only the ASGI callables that they receive. The modules open no socket and start no
task.
"""
