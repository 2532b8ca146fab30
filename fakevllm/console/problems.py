"""Find the problems of a running proxy, each with a remedy. The functions do no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fakevllm.runtime.admin_client import Json
from fakevllm.runtime.plurals import counted


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that keeps the proxy from answering or from training."""

    text: str
    """What is wrong, in one sentence."""
    remedy: str
    """What to do about it, in one sentence. Empty if the text already says it."""
    page: str = ""
    """Path of the console's page on which it can be done. Empty if there is none."""
    page_name: str = ""
    """Text of the link to this page."""


MIN_GROUPS = 50
"""Number of trained groups from which on their rewards are judged."""
MIN_UNEQUAL = 0.1
"""Share of groups with different rewards below which training is called useless."""

_OFFLINE = Problem(
    "The engine is not started, so requests are answered with status 503.",
    "An admin's proxy starts it: run `fakevllm serve` with an admin's key for the server, or read "
    "the proxy's log.",
)
_BOOTING = Problem(
    "The engine is starting, so requests wait or are answered with status 503.",
    "If this takes longer than some minutes, read engine.log in the server's run directory.",
)
_ENGINE_PROBLEMS = {"ENGINE.OFFLINE": _OFFLINE, "ENGINE.BOOTING": _BOOTING}
_NO_SERVER = Problem(
    "The proxy cannot reach the swarm server.",
    "Start it with `fakevllm-server start`, or set swarm.url to its address.",
)
_PAUSED = Problem(
    "Training is paused: each request is answered once, and nothing new is trained.",
    "Run `fakevllm resume` when training may go on.",
    "/training",
    "Resume training",
)
_NO_HOOKS = Problem(
    "The proxy has no hooks, so nothing is trained.",
    "Start it with `fakevllm serve --hooks FOLDER`.",
)


def find_problems(stats: Json) -> list[Problem]:
    """Return the proxy's problems, the most important one first. `stats` is the JSON of
    `/fakevllm/stats`.

    >>> [problem.remedy for problem in find_problems({"engine": None})]
    ['Start it with `fakevllm-server start`, or set swarm.url to its address.']
    """
    return list(_problems(stats))


def _problems(stats: Json) -> Iterator[Problem]:
    engine: Json | None = stats.get("engine")
    if engine is None:
        yield _NO_SERVER
    elif engine.get("engine_status") in _ENGINE_PROBLEMS:
        problem = _ENGINE_PROBLEMS[engine["engine_status"]]
        detail = engine.get("engine_status_detail")
        yield problem if not detail else Problem(f"{problem.text} {detail}", problem.remedy)
    if error := stats.get("ledger_error"):
        yield Problem(
            f"The proxy cannot write its ledger: {error}.",
            "Free space on the disk or repair the file; what is not written is not trained.",
        )
    elif num := stats.get("ledger_dropped"):
        yield Problem(
            f"{counted(num, 'write')} to the ledger failed since the proxy started.",
            "Read the proxy's log for the cause.",
        )
    if stats.get("paused"):
        yield _PAUSED
    if not stats.get("has_hooks", True):
        yield _NO_HOOKS
    yield from _hook_problems(stats.get("hook_failures") or {})
    if message := stats.get("hooks_changed"):
        # The message ends with the remedy.
        yield Problem(str(message), "", "/hooks", "Look at the hooks")
    release: Json = stats.get("release") or {}
    if trouble := release.get("trouble"):
        yield Problem(
            f"The release gate cannot decide: {trouble}.",
            "`fakevllm release status` shows the versions.",
            "/releases",
            "Look at the releases",
        )
    if release.get("is_held"):
        yield Problem(
            "Releases are on hold, so no newer version answers.",
            "Run `fakevllm release resume` when versions may be released again.",
            "/releases/hold",
            "Resume releases",
        )
    yield from _guard_problems(stats.get("guard") or {})
    yield from _signal_problems((engine or {}).get("totals") or {})
    yield from _privacy_problems(stats.get("privacy") or {})
    arms: Json = stats.get("arms") or {}
    troubles: dict[str, str] = arms.get("trouble") or {}
    for arm, trouble in troubles.items():
        yield Problem(
            f"The {arm} arm cannot be sampled: {trouble}.", "The newest weights answer meanwhile."
        )


def _hook_problems(failures: Json) -> Iterator[Problem]:
    """Yield a problem if a hook failed for at least half of the latest groups."""
    num, num_failed = int(failures.get("num_groups", 0)), int(failures.get("num_failed", 0))
    if num_failed and num_failed >= num / 2:
        yield Problem(
            f"A hook failed for {num_failed} of {'the latest ' if num > 1 else ''}"
            f"{counted(num, 'group')}, so nothing of them was trained: {failures['reason']}.",
            "A dry run on the page Hooks shows the whole error. Correct the hook, and reload it.",
            "/hooks",
            "Look at the hooks",
        )


def _guard_problems(guard: Json) -> Iterator[Problem]:
    for alarm in guard.get("alarms", ()):
        yield Problem(
            f"Training may go wrong since step {alarm['step']}, {alarm['message']}.",
            alarm["remedy"],
            "/learning",
            "Look at the curve",
        )
    if (trouble := guard.get("trouble")) and any(one["is_pending"] for one in guard["alarms"]):
        yield Problem(
            f"The guard cannot carry out the action of an alarm: {trouble}.",
            "Until it can, hold releases or go back on the page Releases.",
            "/releases",
            "Look at the releases",
        )


def _signal_problems(totals: Json) -> Iterator[Problem]:
    """Yield a problem if nearly all groups of the run had equal rewards."""
    num, num_unequal = int(totals.get("groups", 0)), int(totals.get("groups_with_signal", 0))
    if num >= MIN_GROUPS and num_unequal < MIN_UNEQUAL * num:
        yield Problem(
            f"Of {num} groups in training steps, {num - num_unequal} had equal rewards for all "
            "answers, and taught the model nothing.",
            "Look at some on the page Groups: the requests may be too hard or too easy for the "
            "model, or the hook may not tell its answers apart.",
            "/groups",
            "Look at the groups",
        )


def _privacy_problems(privacy: Json) -> Iterator[Problem]:
    if num := privacy.get("unsent"):
        yield Problem(
            f"The server has not yet deleted the contents of {counted(num, 'group')}.",
            privacy.get("server_problem") or "Start the server: the proxy asks it again.",
        )
    if trouble := privacy.get("trouble"):
        yield Problem(f"Old contents cannot be pruned: {trouble}.", "Read the proxy's log.")
