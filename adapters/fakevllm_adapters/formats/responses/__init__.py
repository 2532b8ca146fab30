"""OpenAI's Responses format as vLLM serves it, translated to chat completions and back.

`request`, `input` and `tools` translate requests. `items` and `resource` build the response.
`stream` builds the events of a streamed response. `adapter` combines these modules.
"""
