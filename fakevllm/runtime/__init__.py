"""Helpers for processes, asyncio tasks and terminal output, used by the proxy and its commands. The
code in this folder does not depend on groups (requests with their sampled answers) or on training.

* Commands: `admin_client` (HTTP calls to a running proxy), `local_engines` (the engines that `demo`
  and `train` start).
* Asyncio: `task_set` (background tasks), `bounded_tasks` (a limited number of tasks at a time),
  `disconnect` (cancellation when the client disconnects).
* Errors: `error_cause` (the text of an error of a connection).
* Output: `terminal_text` (escaping of untrusted text), `plurals` (numbers with their nouns),
  `progress_bar`, `json_file` (the file of the flag --json).
"""
