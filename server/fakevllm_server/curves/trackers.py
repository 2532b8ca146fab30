"""The trackers by name. A new tracker is a new module and an entry in `TRACKERS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.config.config_file import NO_TRACKER
from fakevllm_server.curves import event_files, wandb_run
from fakevllm_server.curves.event_files import EventFiles
from fakevllm_server.curves.tracker import Tracker
from fakevllm_server.curves.wandb_run import WandbRun


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """How a tracker is opened."""

    title: str
    """Name for messages."""
    folder: str
    """Folder of the tracker's files, in the run directory."""
    open: Callable[[Path], Tracker]
    """Opens the tracker of the run in a folder."""
    has_own_process: bool = False
    """Whether the tracker runs in a process of its own, which can be killed."""


TRACKERS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(
        "TensorBoard",
        event_files.FOLDER,
        lambda run_dir: EventFiles(run_dir / event_files.FOLDER),
    ),
    "wandb": TrackerKind("wandb", wandb_run.FOLDER, WandbRun, has_own_process=True),
}


def folders_with_tables(run_dir: Path) -> list[str]:
    """Return the folders of a run to which tables of sampled answers were written. These texts stay
    until the folders are deleted."""
    return [
        str(run_dir.resolve() / kind.folder)
        for kind in TRACKERS.values()
        if kind.open(run_dir).cursor().has_tables
    ]


def read_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the trackers that the flag `--track` names, each once. Raises ConfigError for an
    unknown name."""
    for name in names:
        if name not in (*TRACKERS, NO_TRACKER):
            raise ConfigError(
                f"Unknown tracker {name!r}: `to` in [tracking] and --track take "
                f"{', '.join(TRACKERS)} or {NO_TRACKER}."
            )
    if NO_TRACKER in names and len(set(names)) > 1:
        raise ConfigError(f"--track {NO_TRACKER} does not go with other trackers: remove one.")
    return tuple(name for name in dict.fromkeys(names) if name != NO_TRACKER)
