"""vLLM as the rollout engine: a child process of the server, or an external server at a URL."""
