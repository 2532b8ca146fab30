"""Routes of the proxy.

* `inference` has the endpoints of the API formats.
* `passthrough` relays other routes to the engine.
* `feedback` accepts feedback. `admin` has the routes below /fakevllm.
"""
