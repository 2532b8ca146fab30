"""The training job: its settings, its YAML spellings, and the checks before anything starts.

`model` has the settings, `ajet_settings` those that AgentJet's jobs share. `yaml_reader` reads a
`job:` mapping or, with `ajet_yaml`, AgentJet's YAML. `validation`, `loss_spec` and
`reward_settings` refuse jobs that contradict themselves. Each error is one line that names the
setting as the user spelt it.

This folder reads no files and computes no loss.
"""
