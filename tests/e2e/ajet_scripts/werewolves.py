"""A script for AgentJet with only its imports changed: the trained model plays werewolves.

AJET_SWARM_URL=http://127.0.0.1:10086 python werewolves.py

The script trains until it is interrupted. Its working directory must have the folder `tutorial`
with the job's YAML.
"""

from __future__ import annotations

import asyncio
import os

from werewolves_game import ExampleWerewolves

from fakevllm.ajet import (
    AgentJetJob,
    AjetTaskReader,
    OpenaiBaseUrlAndApiKey,
    PeriodicDrainThreadPoolExecutor,
    RouterTaskReader,
    SwarmClient,
    Task,
    WorkflowOutput,
    WorkflowTask,
)

NUM_EPOCH = 10000
AJET_SWARM_URL = os.getenv("AJET_SWARM_URL", "http://localhost:10086")


def main() -> None:
    dataset = RouterTaskReader(reader_type="random_dummy", reader_config=AjetTaskReader())
    ajet_job = AgentJetJob(
        base_yaml_config="tutorial/example_werewolves_swarm/werewolves.yaml",
        algorithm="grpo",
        experiment_name="werewolves_swarm",
        max_env_worker=128,
    )
    swarm_worker = SwarmClient(AJET_SWARM_URL)
    swarm_worker.auto_sync_train_config_and_start_engine(ajet_job)
    grpo_n = ajet_job.num_repeat
    remote_batch_size = ajet_job.batch_size

    def rollout(task: Task) -> None:
        episode_uuid, api_baseurl_key = swarm_worker.begin_episode(discard_episode_timeout=240)
        workflow_output = execute_agent(task, api_baseurl_key)
        swarm_worker.end_episode(task, episode_uuid, workflow_output)

    executor = PeriodicDrainThreadPoolExecutor(
        workers=grpo_n * remote_batch_size, max_parallel=64, auto_retry=True
    )
    for _ in range(NUM_EPOCH):
        for _, task in enumerate(dataset.generate_training_tasks()):
            for _ in range(grpo_n):
                executor.submit_with_periodic_drain(fn=rollout, task=task)


def execute_agent(task: Task, api_baseurl_key: OpenaiBaseUrlAndApiKey) -> WorkflowOutput:
    game = ExampleWerewolves(
        trainable_targets=["werewolf"],
        big_external_opponent_llm_name="scripted",
        big_external_opponent_llm_url=None,
    )
    return asyncio.run(game.execute(WorkflowTask(task=task), api_baseurl_key))


if __name__ == "__main__":
    main()
