"""What hooks print is redacted, and their streams work as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm.hooks.hook_runner import HookWorker
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from tests.proxy.hooks.hook_calls import reward

HOOK = """
import logging, subprocess, sys

log = logging.getLogger("own")
log.addHandler(logging.StreamHandler())

def on_compute_relative_reward(valid_results, all_answers):
    sys.stdout.buffer.write(b"bytes of ann@example.org\\n")
    sys.stdout.flush()
    print("encoding", sys.stdout.encoding, sys.stderr.errors)
    log.warning("logged ann@example.org")
    print("-----BEGIN PRIVATE KEY-----")
    print("MIIEplantedline")
    print("-----END PRIVATE KEY-----")
    print("two\\nlines of K-1\\n2")
    subprocess.run(["true"], stdout=sys.stdout, stderr=sys.stderr, check=True)
    sys.stdout.buffer.write(b"\\xff\\n")
    print("unfinished ann@example.org", end="")
    return [1.0] * len(all_answers)
"""
SETTINGS = PrivacySettings(redact=("email", "api_key"), patterns={"number": r"K-\d\n\d"})
SECRETS = ("ann@example.org", "MIIEplantedline", "K-1\n2")


async def printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], redaction: RedactionInUse, *, is_late: bool
) -> str:
    (tmp_path / "hooks.py").write_text(HOOK)
    worker = HookWorker(tmp_path, 20.0, redaction=redaction)
    await worker.start()
    if is_late:
        redaction.set_other(SETTINGS)
    try:
        assert (await reward(worker, "a", "b")).reason is None
    finally:
        await worker.close()
    return capfd.readouterr().err


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_hooks_print_is_redacted_also_if_redaction_begins_after_their_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_late: bool
) -> None:
    own = PrivacySettings() if is_late else SETTINGS
    text = await printed(tmp_path, capfd, RedactionInUse(own), is_late=is_late)
    assert [secret for secret in SECRETS if secret in text] == []
    assert "bytes of [redacted: email]" in text
    assert "logged [redacted: email]" in text
    assert "unfinished [redacted: email]" in text
    assert "encoding utf-8 backslashreplace" in text


async def test_what_hooks_print_stays_as_it_is_without_redaction(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    redaction = RedactionInUse(PrivacySettings())
    text = await printed(tmp_path, capfd, redaction, is_late=False)
    assert all(secret in text for secret in SECRETS)
    assert "bytes of ann@example.org" in text
