"""verl's trainer (FSDP2) in Ray workers. This trainer can be combined with any rollout engine.

    __main__.py          the trainer's process: settings, workers, HTTP
    trainer.py           the TrainEngine: boot, step, log-probabilities, checkpoints
    cluster.py           the Ray cluster: an existing one, or a private one
    session_cleanup.py   a process that kills the processes that a dead trainer left
    worker_placement.py  number of workers per node
    worker_group.py      one method call on all workers
    worker.py            one worker (rank) of verl, with a reference policy and an export
    worker_config.py     verl's configuration object for a worker
    policy_loss.py       verl's policy loss, with this project's KL term
    batch_split.py       division of single calls among the workers
    forest_split.py      division of calls that share prefixes among the workers
    forest_engine.py     verl's engine, with a forward step that computes shared prefixes once
    tensordict_batch.py  calls in verl's batch format
    step_metrics.py      metrics of a step before its first update
    weight_files.py      weights as safetensors files
    install_check.py     check that Ray and a tested verl are installed
    cpu_platform.py      a platform plugin with which verl runs on the CPU

The trainer runs in a process of its own, which only trains and never samples.
"""
