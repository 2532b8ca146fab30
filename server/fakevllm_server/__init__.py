"""The swarm server: the training server of fakevllm. The server starts the rollout engine and the
trainer. It forwards clients' model calls to the rollout engine, records the tokens of these calls,
and trains the model on these tokens."""
