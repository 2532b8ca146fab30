"""Translation between an app's API format and the upstream's API format, and parsing of answers.

The upstream is the engine or the swarm server that answers the requests. `base` defines the
interfaces Adapter and Exchange, and `registry` lists the adapters. The upstream's formats are
vLLM's chat completions and completions. Requests in these formats are relayed unchanged. Responses
and Messages requests are translated to chat completions, and the answers are translated back.
`vllm_versions` has the differences between vLLM's versions.

If a request has no exact translation, NotTranslated is raised. A field is dropped silently only if
vLLM ignores the field too.
"""
