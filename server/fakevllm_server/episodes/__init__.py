"""Claimed episodes, the pool of groups that wait for training, and the states of the engine.

An episode is one run of an agent on one task. A claim reserves an episode for one client. A group
consists of several answers to one task. The rewards of these answers are compared. This folder
makes four decisions:

* which client may claim an episode
* which calls belong to which episode or group
* which groups are pooled (kept for training)
* when the pool has enough groups for a training step

The module `training.submission_intake` applies these decisions.

The classes are pure. They keep their state in memory, get the clock as an argument, and do no I/O.
They are not thread-safe. After a restart, their state is restored from the journal, which is the
server's SQLite file.
"""
