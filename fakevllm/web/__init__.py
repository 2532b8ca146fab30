"""The proxy's web application.

* `proxy_components` opens and closes the parts of a running proxy. Each module in `startup/` starts
  the parts of one subject.
* `app` builds the ASGI application from the routes in `routes/`, and serves it.
* `cors` answers CORS preflight requests of web pages.
"""
