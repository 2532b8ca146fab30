"""The proxy's configuration. fakevllm.toml overrides the defaults, and flags override both. The
configuration is checked once, then frozen.

* `model` has the whole configuration and `load`, which reads it.
* `policy`, `serving`, `reward` and `upstream` have the sections of one subject each.
* `errors` describes a mistake in one line.
* `key_file` reads and writes the file with the apps' API keys.

Every mistake of a user raises a ConfigError with one line. No message shows an API key.
"""
