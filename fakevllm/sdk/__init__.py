"""The SDK for agents that connect to a swarm server themselves, without a proxy. Import it with
`from fakevllm import SwarmClient`.

Such an agent works in three steps. First, it claims an episode (a slot for one run of the agent) at
the server. Then it makes its model calls with the episode's URL and API key. At the end, it ends
the episode with a reward. The module `client` has the blocking client, which threads may share. The
module `async_client` has the client with async methods.

* `protocol`, `engine_control` and `episode_calls` decide which requests are sent, and when a
  request is retried. These three modules do no I/O. `http_driver` sends the requests.
* `episode` has the classes of the episode objects that an agent uses.
* `episode_executors` runs many episodes in threads. At the end of a script, `exit_wait` waits for
  the submitted episodes. `multi_server` runs one agent with several servers.
* `release_requests` sends an operator's decisions about releases, for `fakevllm release` and for
  the console.

Methods raise SwarmError if the server refuses a request, and ServerUnreachable if no server
answers.
"""
