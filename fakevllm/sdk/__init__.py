"""The SDK for active clients of a swarm server. Import it with `from fakevllm import SwarmClient`.

An active client claims an episode, runs its agent with the episode's model, and ends the episode
with a reward. The client in `client` is for threads, the one in `async_client` for an event loop.

* `protocol`, `engine_control` and `episode_calls` decide which requests are sent, and when a
  request is retried. These modules do no I/O. `http_driver` sends the requests.
* `episode` has the objects that an agent uses.
* `episode_executors` runs many episodes in threads. `multi_server` runs one agent with several
  servers.

Methods raise SwarmError if the server refuses, and ServerUnreachable if no server answers.
"""
