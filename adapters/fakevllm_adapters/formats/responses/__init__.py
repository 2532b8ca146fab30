"""OpenAI's Responses format, as vLLM serves it, over chat completions.

`request`, `input` and `tools` translate requests. `items` and `resource` build the response,
`stream` builds its events. `adapter` combines them.
"""
