"""GET /get_weights: the digest of a version's checkpoint, for the receipts of a proxy."""

from __future__ import annotations

from pathlib import Path

import httpx

from fakevllm_adapters.protocol.weights import WeightsReply
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.journal import row_changes
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.web.app import create_app
from fakevllm_server.web.server_state import ServerState


async def test_a_version_with_a_checkpoint_has_a_digest_and_any_other_has_none(
    tmp_path: Path,
) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    state: ServerState = app.state.server
    saved = SavedCheckpoint(4, "step-00000004", 6, "d" * 64, 0.5)
    try:
        await state.journal.write(row_changes.saved(saved))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            replies = [
                WeightsReply.model_validate_json(
                    (await client.get(f"/get_weights?version={n}")).content
                )
                for n in (6, 4)
            ]
    finally:
        await state.close()
    with_checkpoint, without = replies
    assert (with_checkpoint.digest, with_checkpoint.checkpoint_step) == ("d" * 64, 4)
    assert (without.digest, without.checkpoint_step) == (None, None)
    assert {one.engine for one in replies} == {"fake"}
    assert {one.run_id for one in replies} == {state.run_id}
