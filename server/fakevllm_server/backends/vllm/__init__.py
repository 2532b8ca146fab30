"""vLLM as the rollout engine: a child process of the server, or a vLLM server at a URL."""
