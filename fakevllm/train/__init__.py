"""`fakevllm train`: train an agent with one command and one YAML file.

The file contains the training job, and names the agent's workflow (a Python function) and the
dataset. The command starts a server, unless the file names a running one. It runs the workflow on
the tasks of each training step, and exits after the last step.
"""
