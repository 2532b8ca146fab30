"""HTTP to the engine and to the app. The folder handles one request, its retries and its response.

* `request` has the decoded request, the plan of its siblings and their results. Siblings are the
  answers that are sampled for the request.
* `engine_client` sends calls to the swarm server. `call_slots` limits the number of open calls.
* `relay` passes one answer on to the app while the answer arrives. `app_response` is the response
  to the app, with its keep-alives.
* `retry_handler` holds and retries a request while the engine is unavailable. `retry_policy`
  decides when to retry. `hang_watchdog` ends calls to a server that has disappeared.
  `fallback_server` is the client of another server, which answers if the retries fail.
* `sibling_limit` limits the number of siblings that are sampled at a time.

This folder guarantees exactly one response to each request. If the app speaks the format of the
upstream server, the answer is relayed byte for byte. This folder does not depend on rewards or
training.
"""
