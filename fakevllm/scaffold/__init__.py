"""`fakevllm init`: writes the folder of a new project, which can run at once on the demo's model.

The folder has the configuration, the hooks with their tests, a small dataset, simulated users, the
configuration of one app, and a README. Most of these files are made from files in `templates/`. The
reward hooks come from the package `reward_hooks`, and the configurations of apps from
`adapters/apps`. A new kind of reward or a new app is one folder in `templates/` and one entry in a
table.

With `--skills`, `fakevllm init` also writes the folders of `skills/`, which are instructions for
coding assistants.
"""
