"""API formats: translation between an app's format and the upstream's, and parsed answers.

`base` defines the interfaces Adapter and Exchange, `registry` lists the adapters. vLLM's chat
completions and completions are the upstream formats; requests in them are relayed unchanged.
Responses and Messages requests are translated to chat completions and back. `vllm_versions` holds
the differences between vLLM's versions.

A request that cannot be translated exactly raises NotTranslated. No field is dropped silently
unless vLLM ignores it too.
"""
