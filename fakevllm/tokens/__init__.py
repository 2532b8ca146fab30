"""`fakevllm tokens`: what the model was shown and said, token by token, and what that was worth."""
