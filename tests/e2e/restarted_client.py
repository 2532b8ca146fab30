"""A client program that a test edits between two runs: the test replaces EDITED_HERE.

python restarted_client.py http://127.0.0.1:10086
"""

from __future__ import annotations

import sys
from uuid import uuid4

from fakevllm import SwarmClient, Task, TrainJob, run_episodes_until_all_complete

client = SwarmClient(sys.argv[1])
client.auto_sync_train_config_and_start_engine(TrainJob(batch_size=2, num_repeat=2, lr=0.1))


def rollout(task: Task) -> None:
    with client.episode(task, discard_episode_timeout=5.0) as episode, episode.openai() as model:
        model.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
        # EDITED_HERE
        episode.end(reward=float(episode.uuid[0] in "01234567"))
    print("ended", flush=True)


run_id = uuid4().hex
tasks = [Task(task_id=f"{run_id}-{number // 2}") for number in range(10_000)]
run_episodes_until_all_complete(tasks, rollout, max_workers=4)
