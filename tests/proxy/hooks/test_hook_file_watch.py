"""Changes of hook files while the hooks run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fakevllm.hooks.hook_file_watch import HookFileWatch
from fakevllm.hooks.loader import content_hash
from tests.e2e.hook_files import PREFER_YES, write_hooks

MENDED = PREFER_YES.replace('"yes"', '"no"')


async def test_a_changed_hook_file_is_logged_once_and_reported_until_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_hooks(tmp_path / "hooks", PREFER_YES)
    running = content_hash(folder)
    watch = HookFileWatch(folder, lambda: running)
    with caplog.at_level(logging.WARNING):
        assert await watch.check() is None
        for text in (MENDED, MENDED + "# mended twice\n"):
            write_hooks(folder, text)
            for _ in range(2):
                message = await watch.check()
                assert message is not None and "`fakevllm hooks reload`" in message
                assert str(folder) in message
        assert len(caplog.records) == 1 and "changed on disk" in caplog.text
        running = content_hash(folder)
        assert await watch.check() is None
        write_hooks(folder, PREFER_YES)
        assert await watch.check() is not None
    assert len(caplog.records) == 2


async def test_a_file_that_was_added_or_deleted_is_a_change(tmp_path: Path) -> None:
    folder = write_hooks(tmp_path / "hooks", PREFER_YES)
    running = content_hash(folder)
    watch = HookFileWatch(folder, lambda: running)
    (folder / "more.py").write_text("x = 1\n")
    assert "changed on disk" in str(await watch.check())
    for file in folder.iterdir():
        file.unlink()
    assert "cannot be read" in str(await watch.check())


async def test_a_touched_file_with_the_same_text_is_no_change(tmp_path: Path) -> None:
    folder = write_hooks(tmp_path / "hooks", PREFER_YES)
    watch = HookFileWatch(folder, lambda: running)
    running = content_hash(folder)
    write_hooks(folder, PREFER_YES)
    assert await watch.check() is None
