"""OpenAI's Responses format, as vLLM serves it, over chat completions.

`request` with `input` and `tools` translates requests. `items` and `resource` build the response,
`stream` builds its events. `adapter` combines them.
"""
