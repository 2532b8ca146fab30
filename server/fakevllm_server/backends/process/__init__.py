"""Engines in child processes. A rollout engine and a trainer form one backend.

engine_registry.py   engines by name, and which rollout and trainer a `--backend` has
rollout_trainer_pairs.py  a rollout and a trainer in one process or in two
child_engine.py   client of our own engines: HTTP over a Unix socket
child_process.py  start, watch and stop of a child process
trainer_thread.py  a thread of a trainer, which runs one action after another
procfs.py         live processes of a group or a session (Linux)
"""
