"""HTTP at the level of ASGI: requests, responses, access checks and limits, without a framework.

`access_guard` decides before any route runs whether a request may proceed: host, origin, API key,
size and number of concurrent calls. `limits` and `client_body` bound what one request may demand.
Refusals are vLLM's errors.

These modules await the callables that they receive. They never open a socket or start a task.
"""
