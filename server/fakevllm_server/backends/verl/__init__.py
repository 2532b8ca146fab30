"""verl's trainer (FSDP2) in Ray workers. This trainer can be combined with any rollout engine.

    __main__.py          the trainer's process: settings, workers, HTTP
    trainer.py           the TrainEngine: boot, step, log-probabilities, checkpoints
    cluster.py           the Ray cluster: an existing one, or a private one
    session_cleanup.py   a process that kills the processes that a dead trainer left
    checkpoint_files.py  whether a checkpoint has the files of all workers
    checkpoint_state.py  the workers' checkpoints, which any number of workers can restore
    released_checkpoint.py  checkpoints of version 0.8.0 and older
    worker_placement.py  number of workers per node, and the worker on the first GPU
    worker_group.py      one method call on all workers
    worker.py            one worker (rank) of verl, with a reference policy and an export
    trainer_arguments.py arguments of this process, from a job or a checkpoint
    adapter_check.py     check that LoRA adapters fit the model
    worker_config.py     verl's configuration object for a worker
    batch_split.py       division of single calls among the workers
    forest_split.py      division of calls that share prefixes among the workers
    forest_engine.py     verl's engine, with a forward step that computes shared prefixes once
    step_rows.py         the rows of a step, their loss and its derivatives
    worker_loss.py       the loss function of the workers
    row_layout.py        positions of response tokens in the workers' rows
    tensordict_batch.py  calls in verl's batch format
    weight_export.py     weights of all workers as a model folder
    weight_sending.py    weights of all workers to vLLM, without a folder
    weight_files.py      safetensors files that several processes write together
    install_check.py     check that Ray and a tested verl are installed
    cpu_platform.py      a platform plugin with which verl runs on the CPU

The trainer runs in a process of its own, which only trains and never samples.
"""
