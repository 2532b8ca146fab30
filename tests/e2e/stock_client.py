"""A minimal client that sends the same requests as AgentJet's client, without our SDK.

* It polls the engine's status in the background.
* It repeats a claim, after a pause that depends on the text of the refusal.
* It replaces the host of a claim's base URL with the host that it connects to.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from tests.e2e.swarm_wire import OFFLINE, ROLLING, Json, Wire

POLL_S = 0.05
NO_EPISODE_S = 0.05
"""Pause after "no episode"; AgentJet's client waits 2 s."""
NOT_READY_S = 0.2
"""Pause after any other refusal; AgentJet's client waits 15 s."""
AGREE_RETRY_S = 2.0
"""Pause after a refused agreement, as in AgentJet's client."""
WAITER_POLL_S = 5.0
"""Pause between two looks at the status while AgentJet's client waits for a state."""
WAIT_S = 90.0
"""Seconds after which a wait fails; AgentJet's client waits without a limit."""
KNOWN = ("Engine is syncing weights", "Engine is in post-rolling phase")
STEPPING = ("ENGINE.ROLLING_POST", "ENGINE.WEIGHT_SYNCING")
NO_EPISODE = "No available episodes to claim."


class StockClient:
    def __init__(self, url: str, speed: float = 1.0) -> None:
        """Create a client. `speed` divides the pauses of its waits for a status."""
        self.wire = Wire(url)
        self._speed = speed
        self.statuses: list[str] = []
        """The engine's statuses, without repetitions."""
        self.unknown: list[str] = []
        """Refusals for which AgentJet's client only warns."""
        self._polls = Wire(url)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(10)
        self._polls.http.close()
        self.wire.http.close()

    def start(self, job: str) -> None:
        """Start the engine and wait for ROLLING; fail if the engine goes OFFLINE again."""
        self.wire.sync(job)
        assert self.wire.post("/start_engine")["success"]
        was_on = False
        while (status := self.wire.status) != ROLLING:
            assert not (was_on and status == "ENGINE.OFFLINE"), "the engine went off"
            was_on = was_on or status != "ENGINE.OFFLINE"
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the engine and wait for OFFLINE."""
        assert self.wire.post("/stop_engine") == {"success": True, "failure_reason": ""}
        self._wait_for((OFFLINE,), time.monotonic() + WAIT_S)

    def begin_episode(self) -> Json:
        """Wait for ROLLING and claim an episode. Repeat both until the claim succeeds.

        Raises TimeoutError where AgentJet's client would wait for ever.
        """
        deadline = time.monotonic() + WAIT_S
        while True:
            self._wait_for((ROLLING,), deadline)
            claimed = self.wire.post("/claim_episode", self.wire.claim_body())
            if claimed["success"]:
                own = re.sub(r"^https?://[^/]+", self.wire.url, claimed["openai_base_url"])
                return claimed | {"openai_base_url": own}
            cause = claimed["fail_cause"]
            if NO_EPISODE not in cause and not any(known in cause for known in KNOWN):
                self.unknown.append(cause)
            time.sleep(NO_EPISODE_S if NO_EPISODE in cause else NOT_READY_S)

    def end_episode(self, episode: str, task: str, reward: float) -> bool:
        """End an episode; return False if the end is lost because weights were being synced."""
        sent = self.wire.send("/end_episode", self.wire.end_body(episode, task, reward))
        if sent.status_code == 400 and "WEIGHT_SYNCING" in sent.json()["detail"]:
            return False
        reply: Any = sent.json()
        assert sent.status_code == 200 and reply == {"success": True}, reply
        return True

    def agree_sync_weight(self) -> bool:
        """Agree to a step, and wait until it is seen to have begun, as AgentJet's client does.

        Return False if the engine left ROLLING before the agreement was accepted. Raises
        TimeoutError where AgentJet's client would wait for ever.
        """
        deadline = time.monotonic() + WAIT_S
        body = {"client_uuid": self.wire.client_uuid}
        while not self.wire.post("/agree_sync_weight", body)["success"]:
            if self.wire.status != ROLLING:
                return False
            self._pause(AGREE_RETRY_S, deadline)
        self._wait_for(STEPPING, deadline)
        return True

    def _wait_for(self, statuses: tuple[str, ...], deadline: float) -> None:
        """Look at the engine's status at the interval of AgentJet's client until the status is one
        of `statuses`."""
        while self.wire.status not in statuses:
            self._pause(WAITER_POLL_S, deadline)

    def _pause(self, seconds: float, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("AgentJet's client would wait for ever")
        time.sleep(seconds / self._speed)

    def _poll(self) -> None:
        while not self._is_closed.wait(POLL_S):
            status = self._polls.status
            if self.statuses[-1:] != [status]:
                self.statuses.append(status)
