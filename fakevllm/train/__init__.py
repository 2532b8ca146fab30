"""`fakevllm train`: one file says what to train, on what, and by which agent; one command brings
the server, plays the agent and ends."""
