"""`fakevllm train`: train an agent with one command and one YAML file.

The file names the job, the agent's workflow and the dataset. The command starts the server, runs
the workflow on the tasks of each step, and ends after the last step.
"""
