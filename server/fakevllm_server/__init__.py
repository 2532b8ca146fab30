"""The swarm server: the training server of fakevllm. It starts the rollout engine and the trainer,
forwards clients' model calls to the rollout engine, records the tokens of these calls, and trains
the model on them."""
