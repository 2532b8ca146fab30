"""The settings of a training job, the two forms of its YAML, and the checks before a run starts.

`model` defines the settings. `ajet_settings` defines the settings that AgentJet's jobs have too.
`yaml_reader` reads a `job:` mapping or, with `ajet_yaml`, AgentJet's YAML. `validation`,
`loss_spec` and `reward_settings` refuse jobs whose settings contradict each other. Each error is
one line that names the setting as the user spelt it.

The modules of this folder read no files and compute no loss.
"""
