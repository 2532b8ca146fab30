"""A test that no log and no file of a run contains a key that was used or tried."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.ledgers import wait_for_groups
from tests.e2e.processes import Processes

APP, SWARM, WRONG = "sk-app-s3cret-one", "sk-swarm-s3cret-two", "sk-wrong-s3cret-three"
CHAT = "/v1/chat/completions"
BODY = {"model": "fake", "messages": [{"role": "user", "content": "yes or no?"}]}


def files_with(folder: Path, secret: str) -> list[Path]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 3
    return [file for file in files if secret.encode() in file.read_bytes()]


def test_no_key_that_was_used_or_tried_is_in_a_log_or_in_the_ledger(
    processes: Processes, yes_hooks: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = tmp_path_factory.mktemp("keys")
    (keys / "swarm").write_text(f"{SWARM}\n")
    (keys / "app").write_text(f"{APP}\n")
    (keys / "proxy.toml").write_text(f"[swarm]\nkey = '{SWARM}'\n")
    server = processes.server("--backend", "fake", "--key-file", str(keys / "swarm"))
    flags = ("--key-file", str(keys / "app"), "--config", str(keys / "proxy.toml"), "--n", "2")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), *flags)
    with httpx.Client(base_url=proxy.url, timeout=30) as http:
        for headers in ({"authorization": f"Bearer {APP}"}, {"x-api-key": APP}):
            for body in (BODY, BODY | {"stream": True}, BODY | {"n": 0}, {"messages": 1}):
                assert http.post(CHAT, json=body, headers=headers).status_code in (200, 400)
            assert http.post(CHAT, content=b"{", headers=headers).status_code == 400
            assert http.get(f"/nothing?key={WRONG}", headers=headers).status_code == 404
        for headers in ({"authorization": f"Bearer {WRONG}"}, {"x-api-key": WRONG}):
            assert http.post(CHAT, json=BODY, headers=headers).status_code == 401
    wait_for_groups(proxy, 4)
    proxy.stop()
    server.stop()
    for secret in (APP, SWARM, WRONG):
        assert files_with(processes.folder, secret) == []
