"""Process plumbing for the proxy and its commands. Nothing here knows about groups or training.

* Commands: `admin_client` (HTTP calls to a running proxy), `supervisor`
  (child processes), `local_engines` (the engines that `demo` and `train` start).
* Asyncio: `uvicorn_server`, `task_set` (background tasks), `disconnect` (cancellation when the
  client disconnects).
* Output: `terminal_text` (escaping of untrusted text).
"""
