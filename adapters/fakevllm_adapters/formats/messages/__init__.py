"""Anthropic's Messages format as vLLM serves it, translated to chat completions and back.

`schema` validates request bodies as vLLM does, and `request` translates them to chat completions.
`answer` and `stream` translate the response back. `adapter` combines these modules.
"""
