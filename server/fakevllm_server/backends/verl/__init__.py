"""verl's trainer (FSDP2) in Ray workers. The verl trainer can be combined with any rollout engine.

    __main__.py          the trainer's process: settings, workers, HTTP
    trainer.py           the TrainEngine: boot, step, log-probabilities, checkpoints
    cluster.py           the Ray cluster: an existing one, or a private one
    session_cleanup.py   ends what a killed trainer leaves running
    worker_placement.py  number of workers per node
    worker_group.py      one method call on all workers
    worker.py            one worker (rank) of verl, with a reference policy and an export
    worker_config.py     the settings of a worker, as verl's configuration
    policy_loss.py       verl's policy loss, with this project's KL term
    batch_split.py       which worker trains on which calls
    tensordict_batch.py  calls as verl's rows
    step_metrics.py      metrics of a step before its first update
    weight_files.py      weights as safetensors files
    install_check.py     whether Ray and a tested verl are installed
    cpu_platform.py      the CPU as a platform of verl

The trainer runs in a separate process, which only trains and never samples.
"""
