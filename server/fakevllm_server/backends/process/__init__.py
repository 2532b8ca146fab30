"""Engines in child processes. A rollout engine and a trainer form one backend.

engine_registry.py   tables: engines by name, and the rollout and the trainer of each `--backend`
rollout_trainer_pairs.py  a rollout and a trainer in one process or in two
child_engine.py   client of the engines `fake`, `embedded` and `verl`: HTTP over a Unix socket
child_process.py  start, watch and stop of a child process
trainer_thread.py  a thread of a trainer, which runs one action after another
procfs.py         live processes of a group or a session (Linux)
"""
