"""Engines in child processes. A rollout engine and a trainer together form one backend.

engine_registry.py        the engines by name, and the pair of engines for each `--backend`
rollout_trainer_pairs.py  a rollout and a trainer in one process or in two
weight_transports.py      the ways in which new weights get from a trainer to a rollout
child_engine.py           client of the engines `fake`, `embedded` and `verl` over a Unix socket
child_process.py          start, watch and stop a child process
trainer_thread.py         a trainer's thread, which runs one action after another
procfs.py                 live processes of a process group or a session (Linux)
"""
