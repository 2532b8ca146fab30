"""The proxy's configuration. Settings in fakevllm.toml override the defaults, and flags override
both. The configuration is checked once and cannot change afterwards.

* `model` has the whole configuration, and `load`, which reads it.
* `policy`, `serving`, `reward` and `upstream` each define the sections of the file for one subject.
* `errors` describes a mistake in one line.
* `key_file` reads and writes the file with the apps' API keys.

Every mistake of a user raises a ConfigError whose message has one line. No message shows an API
key.
"""
