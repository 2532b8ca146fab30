"""Changes of hook files while the hooks run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from fakevllm.hooks import file_events
from fakevllm.hooks.file_events import FileEvents
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


async def test_edited_files_are_reloaded_and_tried_again_if_that_was_postponed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_hooks(tmp_path / "hooks", PREFER_YES)
    running = content_hash(folder)
    tried: list[str] = []

    async def reload() -> str | None:
        nonlocal running
        tried.append(content_hash(folder))
        if len(tried) == 1:
            raise RuntimeError("a bug")
        if len(tried) == 2:
            return None
        running = tried[-1]
        return running

    watch = HookFileWatch(folder, lambda: running, reload)
    task = asyncio.create_task(watch.run())
    try:
        write_hooks(folder, MENDED)
        first = content_hash(folder)
        await until(lambda: len(tried) == 1)
        assert "the log says why" in str(await watch.check())
        write_hooks(folder, MENDED + "# mended twice\n")
        await until(lambda: running == content_hash(folder))
        assert tried == [first, running, running]
        assert await watch.check() is None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "could not be reloaded" in caplog.text and "changed on disk" not in caplog.text


async def test_a_written_file_is_noticed_at_once(tmp_path: Path) -> None:
    events = FileEvents(tmp_path)
    receiving = asyncio.create_task(events.run())
    try:
        noticed = asyncio.create_task(events.wait(60.0))
        number = 0
        while not noticed.done():  # the folder is watched only after a moment
            number += 1
            (tmp_path / "hook.py").write_text(f"x = {number}\n")
            await asyncio.wait([noticed], timeout=0.5)
            assert number < 60
        (tmp_path / "notes.txt").write_text("no hook")
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.5)  # events of the last write
        await events.wait(0.1)
        await events.wait(1.0)
        assert asyncio.get_running_loop().time() - began >= 1.5
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


async def test_a_folder_that_cannot_be_watched_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_events, "RETRY_S", 0.01)
    receiving = asyncio.create_task(FileEvents(tmp_path / "missing").run())
    await until(lambda: "cannot be watched" in caplog.text)
    await asyncio.sleep(0.2)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    assert len(caplog.records) == 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


async def test_files_that_vanish_are_logged_once_and_a_new_link_target_is_reloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_hooks(tmp_path / "first", PREFER_YES)
    second = write_hooks(tmp_path / "second", MENDED)
    link = tmp_path / "hooks"
    link.symlink_to("first")
    running = content_hash(link)

    async def reload() -> str | None:
        nonlocal running
        running = content_hash(link)
        return running

    task = asyncio.create_task(HookFileWatch(link, lambda: running, reload).run())
    try:
        await asyncio.sleep(0.5)
        link.unlink()
        await until(lambda: "cannot be read" in caplog.text)
        link.symlink_to(link)
        await asyncio.sleep(2.5)
        assert caplog.text.count("cannot be read") == 1
        link.unlink()
        link.symlink_to("second")
        await until(lambda: running == content_hash(second))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_library_that_watches_files_does_not_log_each_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):  # as in the proxy
        assert not logging.getLogger("watchfiles.main").isEnabledFor(logging.INFO)
