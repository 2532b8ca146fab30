"""OpenAI's Responses format, as vLLM serves it, over chat completions.

`request`, `input` and `tools` translate requests. `items` and `resource` build the response.
`stream` builds the events of a streamed response. `adapter` combines these modules.
"""
