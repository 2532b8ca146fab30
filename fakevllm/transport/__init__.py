"""HTTP to the engine and to the app: one request, its retries, and its response.

* `request` has the decoded request, the plan of its siblings and their results.
* `engine_client` sends calls to the swarm server. `relay` passes one answer on to the app while
  it arrives. `app_response` is the response to the app, with its keep-alives.
* `retry_handler` holds and retries a request while the engine is unavailable, by the decisions of
  `retry_policy`. `hang_watchdog` ends calls to a server that has disappeared. `fallback_server`
  is another server, which answers last.
* `sibling_limit` limits the number of siblings in flight.

The folder promises that the app gets exactly one response. An answer in the upstream's own format
is relayed byte for byte. Nothing here knows about rewards or training.
"""
