"""`/sync_train_code` on the wire: for admins, where it was asked for, and never run."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import httpx
import pytest
from swarm_server.boxes import Box, Member, write_keys

from fakevllm_server.web.train_code import MAX_ZIP_BYTES
from tests.e2e.processes import Processes

HARM = "raise SystemExit('this was imported')\n"


def code() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("ajet/__init__.py", HARM)
    return buffer.getvalue()


def sent(member: Member, raw: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/zip"}
    url = f"{member.url}/sync_train_code"
    return httpx.post(url, content=raw, headers=headers, timeout=20)


def box_with(processes: Processes, *flags: str) -> Box:
    keys = write_keys(processes.folder / "keys")
    return Box(processes.server("--backend", "fake", "--key-file", str(keys), *flags))


def test_a_server_takes_no_code_by_itself_not_even_an_admins(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = box_with(processes)
        answer = sent(box.member("root"), code())
        assert answer.status_code == 403
        assert "start the server with --allow-train-code" in answer.json()["detail"]
        assert not (box.server.folder / "train_code").exists()


def test_code_that_is_taken_lies_in_the_run_directory_and_is_not_run(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = box_with(processes, "--allow-train-code")
        root = box.member("root")
        assert sent(box.member("alice"), code()).status_code == 403
        told = sent(root, code()).json()
        path = Path(told.pop("temp_ajet_code_path"))
        assert told == {"success": True, "message": "Training code synced successfully."}
        assert path.parent.parent == box.server.folder.resolve() / "train_code"
        assert (path / "__init__.py").read_text() == HARM
        for raw, words in (
            (b"", "Uploaded zip file is empty."),
            (b"x", "Uploaded file is not a valid zip file."),
        ):
            answer = sent(root, raw)
            assert (answer.status_code, answer.json()) == (400, {"detail": words})
        assert sent(root, bytes(MAX_ZIP_BYTES + 1)).status_code == 413
        box.start_engine()
        answer = sent(root, code())
        assert answer.status_code == 400
        assert answer.json()["detail"] == (
            "Engine is already started. Call `stop_engine` first before syncing new training code."
        )


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_routes_without_a_body_take_any(tmp_path: Path, body: bytes) -> None:
    with Processes(tmp_path) as processes:
        root = box_with(processes).member("root")
        for path in ("/get_episode_buffer", "/stop_engine"):
            assert httpx.post(root.url + path, content=body).status_code == 200
