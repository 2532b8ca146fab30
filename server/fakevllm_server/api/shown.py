"""Tokens of a group or an episode, to be looked at: what `fakevllm tokens` asks for."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from fakevllm_adapters.protocol.shown import ShownGroup
from fakevllm_server.api.refusals import ClearRoute
from fakevllm_server.config import ConfigError
from fakevllm_server.journal.beside import read_beside
from fakevllm_server.journal.rows import CorruptCall
from fakevllm_server.shown import shown
from fakevllm_server.swarm import Swarm


def router(swarm: Swarm) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)

    @routes.get("/get_episode_tokens")
    def get_episode_tokens(episode: str) -> ShownGroup:
        """In a thread, and beside the journal: it may be long, and nobody waits for it."""
        try:
            found = read_beside(swarm.config.run_dir / "journal.sqlite", shown, episode)
        except CorruptCall:
            raise HTTPException(410, f"What is kept of {episode} is damaged.") from None
        except ConfigError as error:
            raise HTTPException(503, str(error)) from None
        if found is None:
            raise HTTPException(404, f"Nothing is known of {episode}.")
        return found

    return routes
