"""The game of the script werewolves.py, with the interface of an AgentJet workflow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openai import OpenAI

from examples.werewolves import players
from examples.werewolves.game import FIVE, Game, Side
from fakevllm.ajet import OpenaiBaseUrlAndApiKey, WorkflowOutput, WorkflowTask


class ExampleWerewolves:
    """One game of five players. The wolves are the trained model, all others are scripts."""

    def __init__(
        self,
        trainable_targets: Sequence[str],
        big_external_opponent_llm_name: str,
        big_external_opponent_llm_url: str | None,
    ) -> None:
        assert list(trainable_targets) == ["werewolf"]
        self._opponent_url = big_external_opponent_llm_url

    async def execute(
        self, workflow_task: WorkflowTask, api_baseurl_key: OpenaiBaseUrlAndApiKey
    ) -> WorkflowOutput:
        return await asyncio.to_thread(self._play, workflow_task, api_baseurl_key)

    def _play(
        self, workflow_task: WorkflowTask, api_baseurl_key: OpenaiBaseUrlAndApiKey
    ) -> WorkflowOutput:
        seed: int = workflow_task.task.metadata["random_number"]
        game = Game(seed, FIVE)
        static_player = players.static_player(self._opponent_url, "any", seed)
        base_url, api_key = api_baseurl_key.base_url, api_baseurl_key.api_key
        with OpenAI(base_url=base_url, api_key=api_key) as model, static_player as static:
            seats = players.assign_players(game, Side.WOLVES, players.Endpoint(model), static)
            num_illegal = players.play_to_the_end(game, seats, seed)
        has_won = game.winner is Side.WOLVES
        return WorkflowOutput(
            reward=players.aim(game, Side.WOLVES),
            is_success=has_won,
            log_metrics={"won": float(has_won), "illegal": float(num_illegal)},
        )
