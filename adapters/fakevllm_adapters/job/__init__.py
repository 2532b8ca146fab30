"""The settings of a training job, the two forms of its YAML, and the checks before a run starts.

`model` defines the settings. `ajet_settings` defines the settings that AgentJet's jobs have too.
`yaml_reader` reads YAML with a mapping `job:`. `ajet_yaml` reads the YAML of AgentJet, a framework
for training agents. `validation`, `loss_spec` and `reward_settings` refuse jobs whose settings
contradict each other. An error message is one line. It names the setting as the user spelt it.

The modules of this folder read no files and compute no loss.
"""
