"""The rows of the status of a running proxy, as pairs of texts. The command `fakevllm status` and
the console show these rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from fakevllm.runtime.admin_client import FAN_OUT_NO_HOOKS, FAN_OUT_ON, FAN_OUT_PAUSED, Json
from fakevllm.runtime.plurals import counted
from fakevllm_adapters.protocol.replica_text import replica_line

RUN_ID_CHARS = 8
"""Number of characters of a run's id to print."""
MAX_OTHER_RUNS = 5
MIN_MEAN_GROUPS = 40
"""Minimum number of groups for the mean reward at the beginning of a learning curve, and for the
mean reward at its end. A single step is not enough for a reliable mean, because a step may have
only one group."""

NO_SERVER = "the swarm server cannot be reached: start it (`fakevllm-server start`)"
ENGINE_STATES = {
    "ENGINE.OFFLINE": "not started (OFFLINE)",
    "ENGINE.BOOTING": "starting (BOOTING)",
    "ENGINE.ROLLING": "serves requests (ROLLING)",
    "ENGINE.ROLLING_POST": "serves requests, a step is about to begin (ROLLING_POST)",
    "ENGINE.WEIGHT_SYNCING": "trains, or loads new weights (WEIGHT_SYNCING)",
}


def status_rows(stats: Json) -> Iterator[tuple[str, str]]:
    """Yield the rows of the status table as (name, value). `stats` is the JSON of
    `/fakevllm/stats`."""
    engine: Json = stats["engine"] or {}
    yield "fan-out", _fan_out(stats)
    if (hooks := stats.get("hooks")) is not None:
        yield from _hook_rows(hooks, is_edited=bool(stats.get("hooks_changed")))
    if message := stats.get("hooks_changed"):
        yield "hook files", str(message)
    if failed := stats.get("hook_failures"):  # older proxies do not send it
        text = f"{failed['num_failed']} of the latest {counted(failed['num_groups'], 'group')}"
        yield "hook failed", f"{text}: {failed['reason']}"
    state = ENGINE_STATES.get(str(engine.get("engine_status")), NO_SERVER)
    trains = engine.get("async_step_runs")  # older servers do not send it
    yield "engine", f"trains and {state}" if trains else state
    if detail := engine.get("engine_status_detail"):
        yield "engine detail", str(detail)
    for replica in engine.get("replicas") or ():  # older servers do not send it
        yield replica["name"], replica_line(replica)
    yield "model", str(engine.get("model") or "not known yet")
    if step := engine.get("global_step"):
        yield "step", str(step)
    if (release := stats.get("release")) is not None:
        yield from _release_rows(release)
    yield from _guard_rows(stats.get("guard") or {})  # older proxies do not send it
    yield "groups", _counts(stats["counts"])
    yield "not trained", _counts(stats["untrained"])
    if dropped := engine.get("dropped"):
        yield "server dropped", _counts(dropped)
    if failures := stats.get("failures"):
        yield "siblings failed", _counts(failures)
    if (num_bytes := stats.get("ledger_bytes")) and (num := sum(stats["counts"].values())):
        yield "ledger", f"{num_bytes / 1e6:.1f} MB, {num_bytes // num:,} bytes per request"
    yield from _privacy_rows(stats.get("privacy") or {})  # older proxies do not send it
    yield from _learning_rows(stats)
    if stats["ledger_dropped"]:
        yield "ledger", f"{stats['ledger_dropped']} writes dropped"
    if stats["ledger_error"]:
        yield "ledger", f"cannot be written: {stats['ledger_error']}"


def _privacy_rows(privacy: Json) -> Iterator[tuple[str, str]]:
    deleted = {name: privacy.get(name, 0) for name in ("forgotten", "pruned")}
    if any(deleted.values()):
        yield "contents deleted", _counts({name: num for name, num in deleted.items() if num})
    if num := privacy.get("unsent"):
        why = f": the server {privacy['server_problem']}" if privacy.get("server_problem") else ""
        yield "not deleted", f"{counted(num, 'group')} in the server's journal{why}"
    if trouble := privacy.get("trouble"):
        yield "pruning", str(trouble)


def _hook_rows(hooks: Json, *, is_edited: bool) -> Iterator[tuple[str, str]]:
    since = datetime.fromtimestamp(hooks["since"]).isoformat(" ", "seconds")
    older = hooks["num_versions"] - 1
    rest = f"; {counted(older, 'older version')} until the groups are done" if older else ""
    yield "hooks", f"{hooks['digest']} since {since}{rest}"
    # A refusal is over when the files are again those of the running hooks.
    last = hooks["last_reload"] if is_edited else None
    if last is not None and last["state"] != "taken_over":
        yield "last reload", str(last["message"])


def _release_rows(release: Json) -> Iterator[tuple[str, str]]:
    held = "; releases are on hold" if release["is_held"] else ""
    version = release["released"]
    text = "not known yet" if version is None else f"version {version}"
    yield "released", f"{text}{held}"
    figures: Json = release["evaluation"]
    if release["candidate"] is not None:
        text = f"version {release['candidate']}, {counted(figures.get('pairs', 0), 'pair')}"
        if figures.get("difference") is not None:
            low, high = figures["low"], figures["high"]
            text += f", difference {figures['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
        yield "candidate", text
    if release.get("next_candidate") is not None:  # older proxies do not send it
        yield "candidate", f"the next one is version {release['next_candidate']}"
    if "reference" in figures:
        num, size = figures["reference_draws"], figures["reference_size"]
        text = f"training waits for answers of version {figures['reference']}"
        yield "reference", f"{text}: {num} of {size} rows"
    if release["trouble"]:
        yield "release gate", str(release["trouble"])


def _guard_rows(guard: Json) -> Iterator[tuple[str, str]]:
    for alarm in guard.get("alarms", ()):
        action = f"{alarm['action']}, not carried out yet" if alarm["is_pending"] else None
        text = f"since step {alarm['step']}, {alarm['message']}. {alarm['remedy']}"
        yield "alarm", f"{text} (action: {action or alarm['action']})"
    if trouble := guard.get("trouble"):
        yield "guard", str(trouble)


def arm_rows(arms: Json, *, is_gated: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table of arms as (name, value). An arm decides which weights answer a
    session. `arms` is a part of the JSON of `/fakevllm/stats`. `is_gated` is True if the proxy has
    a release gate."""
    for arm, num in arms["sessions"].items():
        yield f"{arm} arm", f"{counted(num, 'session')}, mean reward {arms['means'][arm]:.3f}"
    num_open = counted(arms["open_sessions"], "session")
    whose = "its" if arms["open_sessions"] == 1 else "their"
    yield "open", f"{num_open}, counted ten minutes after {whose} last request"
    # A proxy with a release gate may have no baseline arm. In this case, this gain stays unknown.
    if not is_gated or "baseline" in arms["sessions"]:
        yield "gain of the policy", _gain(arms["policy_gain"], "pair", " of sessions")
    yield "gain of choosing", _gain(arms["choice_gain"], "session")
    if (outside := arms.get("reward_outside")) is not None:
        yield (
            "no intervals",
            f"a reward of {outside:g} is outside of release.reward_range: set the range that your "
            "hook can return",
        )
    for arm, trouble in arms.get("trouble", {}).items():
        yield f"{arm} arm", f"cannot be sampled: {trouble}"


def _gain(gain: Json | None, noun: str, suffix: str = "") -> str:
    if gain is None:
        return "not known yet"
    mean, num = f"{gain['mean']:+.3f}", f"{counted(gain['num'], noun)}{suffix}"
    if gain["low"] is None:
        return f"{mean}, from {num}"
    return f"{mean} ({gain['low']:+.3f} to {gain['high']:+.3f}), from {num}"


def _fan_out(stats: Json) -> str:
    if stats["paused"]:
        return FAN_OUT_PAUSED
    return FAN_OUT_ON if stats.get("has_hooks", True) else FAN_OUT_NO_HOOKS


def _learning_rows(stats: Json) -> Iterator[tuple[str, str]]:
    curve: list[Json] = stats["curve"]
    if not curve:
        return
    others: list[str] = stats["other_runs"]
    names = ", ".join(map(_short_run_id, others[:MAX_OTHER_RUNS]))
    more = f"; {len(others)} more, with --run: {names}" if others else ""
    yield "run", _short_run_id(stats["run_id"]) + more
    curve, change = _since_last_change(curve, stats.get("curve_before", 0))
    if change:
        yield "curve", change
    num_open = _num_open_steps(stats, curve)
    num_finished = len(curve) + stats.get("curve_between", 0) - num_open
    num_steps = "1 step" if num_finished == 1 else f"{num_finished} steps"
    if num_open == 1:
        num_steps += ", and the one being collected"
    elif num_open > 1:
        num_steps += f", and {num_open} that are not finished"
    for name in ("policy_mean", "returned_best"):
        steps = [(step[name], step["groups"]) for step in curve if step[name] is not None]
        if steps:
            first, last = _group_mean(steps), _group_mean(steps[::-1])
            yield name.replace("_", " "), f"{first:.2f} → {last:.2f} in {num_steps}"


def _num_open_steps(stats: Json, curve: list[Json]) -> int:
    """Return the number of steps in `curve` that are not finished by the server's status, from
    which the row `step` comes. The curve comes from the ledger. If requests are answered quickly,
    the ledger may have groups of steps that the latest status does not know."""
    engine: Json = stats["engine"] or {}
    collected = engine.get("global_step")
    if collected is None or stats["run_id"] != engine.get("run_id"):
        return 0
    return sum(step["step"] >= collected for step in curve)


def _since_last_change(curve: list[Json], num_before: int) -> tuple[list[Json], str]:
    """Return the pair (steps, message). The steps are those of the learning curve since the last
    change of the hooks or the job. Rewards from before and after a change cannot be compared. The
    message says which steps were left out. It is empty if no step was left out.

    `num_before` is the number of earlier steps that the proxy has not sent in `curve`.
    """
    start = max((at for at, step in enumerate(curve) if step.get("changed")), default=0)
    num_before += start
    if num_before == 0:
        return curve, ""
    step = curve[start]
    message = (
        f"begins at step {step['step']}: {step['changed']}. The {num_before} steps before are left "
        "out, because their rewards may be on another scale."
    )
    return curve[start:], message


def _group_mean(steps: Iterable[tuple[float, int]]) -> float:
    """Return the mean reward of the groups at the beginning of a learning curve.

    `steps` has the pair (mean reward, number of groups) for each step. Steps are added from the
    beginning, until they have MIN_MEAN_GROUPS groups together. The later steps are not used.

    >>> _group_mean([(1.0, 30), (0.0, 30), (0.5, 90)])
    0.5
    """
    total, num = 0.0, 0
    for mean, groups in steps:
        total, num = total + mean * groups, num + groups
        if num >= MIN_MEAN_GROUPS:
            break
    return total / max(1, num)


def _short_run_id(run_id: str) -> str:
    return run_id[:RUN_ID_CHARS] or "(no name)"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
