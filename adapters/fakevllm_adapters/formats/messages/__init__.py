"""Anthropic's Messages format, as vLLM serves it, over chat completions.

`schema` validates bodies as vLLM does, `request` translates them, `answer` and `stream` translate
the chat completion back. `adapter` combines them.
"""
