"""The SDK: active clients of a swarm server. Import it as `from fakevllm import SwarmClient`.

An active client claims an episode, runs its agent with the episode's model, and ends the episode
with a reward. `client` is for threads, `async_client` for one event loop.

* `protocol`, `engine_control` and `episode_calls` decide which requests are sent, and when a
  request is retried. These modules do no I/O. `http_driver` sends the requests.
* `episode` has the objects that an agent uses.
* `episode_executors` and `multi_server` run many episodes, and one agent with several servers.

Methods raise SwarmError if the server refuses, and ServerUnreachable if no server answers.
"""
