"""`fakevllm train`: train an agent with one command and one YAML file.

The file contains the training job, and names the agent's workflow (a Python function) and the
dataset. The command starts the server, runs the workflow on the tasks of each training step, and
ends after the last step.
"""
