"""The proxy's configuration. Settings in fakevllm.toml override the defaults, and command-line
flags override both. The configuration is checked once and cannot change afterwards.

* `model` defines the class of the whole configuration, and the function `load` that reads the
  configuration.
* `policy`, `serving`, `reward`, `release`, `guard`, `tracing` and `upstream` define sections of
  fakevllm.toml.
* `errors` turns a validation error into a message of one line.
* `setting_origins` lists all settings with the place from which each value came.
* `key_file` reads and writes the file with the apps' API keys.

Every mistake in the configuration raises a ConfigError whose message has one line. No message shows
an API key.
"""
