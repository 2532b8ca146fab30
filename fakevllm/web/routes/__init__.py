"""Routes of the proxy.

* `inference` has the endpoints of the API formats.
* `passthrough` relays other routes to the engine.
* `feedback` accepts users' feedback about answers.
* `admin` has the routes below /fakevllm.
"""
