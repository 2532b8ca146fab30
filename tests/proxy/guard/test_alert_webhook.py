"""Alerts are signed, repeated, bounded, and never delay anybody. The receiver is a real server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from tenacity import wait_none

from fakevllm.guard.alert_webhook import NUM_ATTEMPTS, AlertWebhook
from tests.proxy.guard.alert_receiver import AlertReceiver
from tests.proxy.scripted_swarm import until

ALERT = {"text": "step 3: refusals", "id": "guard-r-3-refusals", "detector": "refusals"}


@asynccontextmanager
async def webhook(
    url: str, secret: str | None = "s3cret", *, max_queued: int = 64, timeout_s: float = 30.0
) -> AsyncGenerator[AlertWebhook]:
    sender = AlertWebhook(
        url, secret, max_queued=max_queued, timeout_s=timeout_s, pause=wait_none()
    )
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sender.close()


async def test_an_alert_arrives_as_json_with_the_signature_of_its_bytes() -> None:
    with AlertReceiver() as receiver:
        async with webhook(receiver.url) as sender:
            sender.put(ALERT)
            await until(lambda: sender.counts["sent"] == 1)
    assert receiver.alerts == [ALERT]
    digest = hmac.new(b"s3cret", receiver.bodies[0], hashlib.sha256).hexdigest()
    assert receiver.headers[0]["X-Fakevllm-Signature"] == f"sha256={digest}"
    assert receiver.headers[0]["Content-Type"] == "application/json"


async def test_without_a_secret_there_is_no_signature() -> None:
    with AlertReceiver() as receiver:
        async with webhook(receiver.url, None) as sender:
            sender.put(ALERT)
            await until(lambda: sender.counts["sent"] == 1)
    assert "X-Fakevllm-Signature" not in receiver.headers[0]


async def test_an_alert_is_repeated_while_the_address_answers_with_500() -> None:
    with AlertReceiver(500, 503, 429) as receiver:
        async with webhook(receiver.url) as sender:
            sender.put(ALERT)
            await until(lambda: sender.counts["sent"] == 1)
            assert receiver.alerts == [ALERT] * 4
            assert sender.counts == {"sent": 1, "failed": 0, "dropped": 0}


async def test_an_alert_that_is_never_accepted_is_lost_with_one_line_without_the_path(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with AlertReceiver(*[500] * NUM_ATTEMPTS) as receiver:
        async with webhook(receiver.url) as sender:
            sender.put(ALERT)
            await until(lambda: sender.counts["failed"] == 1)
            assert len(receiver.alerts) == NUM_ATTEMPTS
            sender.put(ALERT)  # the next one is sent all the same
            await until(lambda: sender.counts["sent"] == 1)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "1 alert to 127.0.0.1:" in line
    assert "it answers with status 500" in line
    assert "secret-path" not in line


@pytest.mark.parametrize(("status", "words"), [(404, "status 404"), (307, "to no other address")])
async def test_a_refusal_or_a_redirect_is_not_repeated_and_not_followed(
    status: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with AlertReceiver(status) as receiver:
        async with webhook(receiver.url) as sender:
            sender.put(ALERT)
            await until(lambda: sender.counts["failed"] == 1)
            assert len(receiver.alerts) == 1
    assert words in caplog.text


async def test_an_address_that_refuses_connections_loses_the_alert_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with AlertReceiver() as receiver:
        url = receiver.url
    async with webhook(url) as sender:
        sender.put(ALERT)
        await until(lambda: sender.counts["failed"] == 1)
    assert caplog.text.count("could not be sent") == 1
    assert "secret-path" not in caplog.text


async def test_an_attempt_that_hangs_is_given_up_and_repeated() -> None:
    with AlertReceiver(hangs=True) as receiver:
        async with webhook(receiver.url, timeout_s=0.05) as sender:
            sender.put(ALERT)
            await until(lambda: len(receiver.alerts) >= 2)
            receiver.release()
            await until(lambda: sender.counts["sent"] + sender.counts["failed"] == 1)


async def test_while_the_address_hangs_further_alerts_wait_up_to_a_bound_and_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with AlertReceiver(hangs=True) as receiver:
        async with webhook(receiver.url, max_queued=2) as sender:
            sender.put(ALERT)
            await until(lambda: receiver.alerts != [])
            for _ in range(3):
                sender.put(ALERT)
            assert sender.counts == {"sent": 0, "failed": 0, "dropped": 1}
            assert "too many alerts wait" in caplog.text
        # At the stop, the alert that was being sent and the two that waited are lost.
        assert sender.counts == {"sent": 0, "failed": 0, "dropped": 4}
        assert "3 alerts to 127.0.0.1:" in caplog.text
