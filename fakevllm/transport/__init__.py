"""HTTP to the engine and to the app: one request, its retries, and its response.

* `request` has the decoded request, the plan of its siblings (the answers sampled for it) and their
  results.
* `engine_client` sends calls to the swarm server. `call_slots` limits the number of open calls.
* `relay` passes one answer on to the app while the answer arrives. `app_response` is the response
  to the app, with its keep-alives.
* `retry_handler` holds and retries a request while the engine is unavailable. `retry_policy`
  decides when to retry. `hang_watchdog` ends calls to a server that has disappeared.
  `fallback_server` is the client of another server, which answers if the retries fail.
* `sibling_limit` limits the number of siblings that are sampled at a time.

This folder guarantees that each request gets exactly one response. If the app speaks the format of
the upstream server, the answer is relayed byte for byte. This folder does not depend on rewards or
training.
"""
