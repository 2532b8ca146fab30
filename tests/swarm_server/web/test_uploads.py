"""The route `/sync_train_code`: only for admins, only with --allow-train-code; the code never
runs."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import httpx
import pytest
from swarm_server.team_server import Member, TeamServer, write_keys

from fakevllm_server.web.uploaded_code import MAX_ZIP_BYTES
from tests.e2e.processes import Processes

HARM = "raise SystemExit('this was imported')\n"


def zipped_code() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("ajet/__init__.py", HARM)
    return buffer.getvalue()


def upload(member: Member, raw: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/zip"}
    url = f"{member.url}/sync_train_code"
    return httpx.post(url, content=raw, headers=headers, timeout=20)


def start_box(processes: Processes, *flags: str) -> TeamServer:
    keys = write_keys(processes.folder / "keys")
    return TeamServer(processes.server("--backend", "fake", "--key-file", str(keys), *flags))


def test_without_the_flag_no_code_is_accepted_not_even_from_an_admin(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = start_box(processes)
        answer = upload(box.member("root"), zipped_code())
        assert answer.status_code == 403
        assert "start the server with --allow-train-code" in answer.json()["detail"]
        assert not (box.server.folder / "train_code").exists()


def test_accepted_code_is_kept_in_the_run_directory_and_not_run(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        box = start_box(processes, "--allow-train-code")
        root = box.member("root")
        assert upload(box.member("alice"), zipped_code()).status_code == 403
        reply = upload(root, zipped_code()).json()
        path = Path(reply.pop("temp_ajet_code_path"))
        assert reply == {"success": True, "message": "Training code synced successfully."}
        assert path.parent.parent == box.server.folder.resolve() / "train_code"
        assert (path / "__init__.py").read_text() == HARM
        for raw, message in (
            (b"", "Uploaded zip file is empty."),
            (b"x", "Uploaded file is not a valid zip file."),
        ):
            answer = upload(root, raw)
            assert (answer.status_code, answer.json()) == (400, {"detail": message})
        assert upload(root, bytes(MAX_ZIP_BYTES + 1)).status_code == 413
        box.start_engine()
        answer = upload(root, zipped_code())
        assert answer.status_code == 400
        assert answer.json()["detail"] == (
            "Engine is already started. Call `stop_engine` first before syncing new training code."
        )


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_routes_without_parameters_accept_any_body(tmp_path: Path, body: bytes) -> None:
    with Processes(tmp_path) as processes:
        root = start_box(processes).member("root")
        for path in ("/get_episode_buffer", "/stop_engine"):
            assert httpx.post(root.url + path, content=body).status_code == 200
