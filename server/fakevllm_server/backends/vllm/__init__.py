"""vLLM as the rollout engine. vLLM is a child process of the server, or an external server at a
URL."""
