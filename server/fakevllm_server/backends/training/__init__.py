"""Rules of a training step that all trainers share, without torch.

    epochs.py          a step's metrics from those of its epochs
    mismatch_limit.py  when a step makes no update
    failed_step.py    how a step that failed after an update is reported

Every trainer backend applies these rules, so a job gives comparable results on all trainers. This
folder does not compute a loss or a gradient.
"""
