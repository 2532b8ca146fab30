"""Rules and settings of training that all trainers share. This folder does not import torch.

    step_calls.py      the calls that a step runs through the model, and their weights in the loss
    mini_batches.py    which groups of a step each update trains
    step_updates.py    a step's metrics from the metrics of its updates
    mismatch_limit.py  when a step makes no update
    failed_step.py     how a step that failed after an update is reported
    lora_settings.py   the LoRA settings of a job

Every trainer backend applies these rules, so a job gives comparable results on all of them. This
folder does not compute a loss or a gradient.
"""
