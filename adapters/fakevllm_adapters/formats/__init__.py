"""Translation between an app's API format and the upstream's API format, and parsing of answers.

The upstream is the engine or the swarm server that answers the proxy's requests. `base` defines the
interfaces Adapter and Exchange, `registry` lists the adapters. vLLM's chat completions and
completions are the upstream formats; requests in them are relayed unchanged. Responses and Messages
requests are translated to chat completions and back. `vllm_versions` holds the differences between
vLLM's versions.

The translation of a request raises NotTranslated if no exact translation exists. A field is
dropped silently only if vLLM ignores the field too.
"""
