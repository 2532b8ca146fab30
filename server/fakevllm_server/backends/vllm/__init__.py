"""vLLM as the rollout engine: a child process or somebody else's server, over its own HTTP."""
