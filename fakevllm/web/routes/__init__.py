"""Routes of the proxy.

* `inference` has the endpoints for model calls, one for each API format.
* `passthrough` relays other routes of vLLM to the engine.
* `stored_responses` has the routes for a stored response of the Responses API.
* `feedback` accepts users' feedback about answers.
* `evaluation` has the routes for `fakevllm eval`.
* `admin` has the other routes below /fakevllm. `group_receipt` makes the reply of one of them.
"""
