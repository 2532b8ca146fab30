"""The training job: its settings, its YAML spellings, and the checks before anything starts.

`model` has the settings, `sections` those that AgentJet's jobs share. `yaml` reads a `job:` mapping
or, with `ajet_yaml`, AgentJet's YAML. `rules`, `loss_spec` and `rewards` refuse jobs that
contradict themselves. Each error is one line that names the setting as the user spelt it.

This folder reads no files and computes no loss.
"""
