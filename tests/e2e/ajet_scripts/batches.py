"""A script for AgentJet with only its imports changed: batches of episodes of a workflow function.

AJET_SWARM_URL=http://127.0.0.1:10086 python batches.py tasks.jsonl

Several machines may run the script with one server. The script prints the rewards of each batch,
and ends after the last task.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import httpx as requests  # scripts import requests, whose `post`, `json` and `headers` are the same

from fakevllm.ajet import (
    AgentJetJob,
    AjetTaskReader,
    JsonlDatasetFile,
    JsonlTrainingFp,
    OpenaiBaseUrlAndApiKey,
    RouterTaskReader,
    SwarmClient,
    Task,
    WorkflowOutput,
    run_episodes_until_all_complete,
)

LOCAL_GRPO_N, BATCH_SIZE = 2, 2
AJET_SWARM_URL = os.getenv("AJET_SWARM_URL", "http://localhost:10086")


def check_answer(answer: str, reference_answer: str) -> bool:
    return re.findall(r"\d+", answer)[-1:] == [reference_answer]


def execute_agent(task: Task, api_baseurl_key: OpenaiBaseUrlAndApiKey) -> WorkflowOutput:
    base_url, api_key = api_baseurl_key.base_url, api_baseurl_key.api_key
    query = task.main_query
    reference_answer = task.metadata["answer"]
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": query},
    ]
    response = requests.post(
        f"{base_url}/chat/completions",
        json={"model": "any", "messages": messages},
        headers={"Authorization": f"Bearer {api_key}"},
    )
    answer = response.json()["choices"][0]["message"]["content"]
    is_success = check_answer(answer, reference_answer)
    reward = 1.0 if is_success else 0.0
    return WorkflowOutput(reward=reward, is_success=is_success, metadata={"answer": answer})


def main() -> None:
    dataset = RouterTaskReader(
        reader_type="jsonl_dataset_file",
        reader_config=AjetTaskReader(
            jsonl_dataset_file=JsonlDatasetFile(training=JsonlTrainingFp(file_path=sys.argv[1]))
        ),
    )
    ajet_job = AgentJetJob(
        algorithm="grpo",
        project_name="ajet-swarm",
        experiment_name="batches",
        n_gpu=1,
        nnodes=1,
        batch_size=BATCH_SIZE,
        num_repeat=LOCAL_GRPO_N,
        use_kl_loss=False,
        use_kl_in_reward=False,
        kl_penalty_type="kl",
        timeline_compare_level="token",
        mini_batch_num=1,
        lr=1e-3,
    )
    swarm_worker = SwarmClient(AJET_SWARM_URL)
    swarm_worker.auto_sync_train_config_and_start_engine(ajet_job)

    def rollout(task: Task) -> Any:
        episode_uuid, api_baseurl_key = swarm_worker.begin_episode()
        workflow_output = execute_agent(task, api_baseurl_key)
        swarm_worker.end_episode(task, episode_uuid, workflow_output)
        return workflow_output.reward

    next_batch: list[Task] = []
    for task in dataset.generate_training_tasks():
        for _ in range(LOCAL_GRPO_N):
            next_batch.append(task)
            if len(next_batch) >= BATCH_SIZE * LOCAL_GRPO_N:
                results = run_episodes_until_all_complete(next_batch, func=rollout, auto_retry=True)
                print(results, flush=True)
                next_batch.clear()


if __name__ == "__main__":
    main()
