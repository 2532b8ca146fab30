"""Writes the curves of a run to Weights & Biases (the package `wandb`), also offline.

Each point is a row of wandb's history. wandb refuses rows whose number goes back, and cannot
discard rows. Therefore the rows have numbers of their own, and the x-axis of all curves is
`training/global_step`. A step that is trained again gets a second row.

The file `fakevllm.json` in wandb's folder has the id of wandb's run, the number of rows, and the
cursor. A restarted server continues this run. Before rows are sent, the file gets their number and
their digest. If the process ends before it knows that wandb has them, the same rows are sent again
under the same numbers. If other rows come first then, all get new numbers: some rows may be there
twice, but wandb refuses none.

A table of sampled answers is a file of its own in wandb's folder, and a second one in its data
folder, from which wandb uploads it. Both folders are in the run directory, so that all texts of the
run are there. A user who sets WANDB_DATA_DIR chooses another data folder.

This module runs in a process of its own (see tracker_process.py), because wandb changes the process
that imports it, and waits for the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fakevllm_adapters.protocol.keys import new_id
from fakevllm_server.curves.points import ChartItem, Cursor, Point
from fakevllm_server.curves.sample_tables import COLUMNS, COMPLETIONS
from fakevllm_server.curves.tracker import TrackerMissing
from fakevllm_server.run.folder import write_atomically

FOLDER = "wandb"
"""Folder in the run directory, with a name that wandb itself chooses."""
STATE_FILE = "fakevllm.json"
PROJECT = "fakevllm"
"""wandb's project, unless the environment variable WANDB_PROJECT names another one."""
STEP = "training/global_step"
"""Metric on the x-axis of all curves."""
INIT_TIMEOUT_S = 20.0
"""Maximum seconds for the connection to wandb's server."""
FINISH_TIMEOUT_S = 5.0
"""Maximum seconds for the upload of the last rows. wandb's files have all rows in any case."""
FLUSH_S = 1.0
"""Seconds after which wandb writes rows to its file. Until then, rows are lost if all processes are
killed."""
SETTINGS: Mapping[str, object] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "host": "",
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "init_timeout": INIT_TIMEOUT_S,
    "finish_timeout": FINISH_TIMEOUT_S,
    "x_transaction_log_flush_interval": FLUSH_S,
}
"""Settings of wandb with which it sends the rows, and of the machine only the operating system and
the versions of Python and wandb: no name of the machine, no output, no code."""


OWN_FOLDERS = ("DATA", "CACHE")
"""wandb's further folders. By default they are in the home folder, and the files of tables stay
there."""


class WandbError(Exception):
    """Error for a run of wandb that cannot be opened. Its message has one line."""


@dataclass(frozen=True, slots=True)
class WandbState:
    """The content of the file `fakevllm.json`."""

    run_id: str
    num_rows: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    num_pending: int = 0
    """Number of further rows that were sent, and that wandb may not have."""
    pending_digest: str = ""
    """SHA-256 of these rows."""


class WandbRun:
    """The run of wandb that belongs to one run. It implements Tracker. The run is opened at the
    first write."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / FOLDER
        self._run: Any = None
        self._state = self._read_state()

    def cursor(self) -> Cursor:
        return self._state.cursor

    def load(self) -> None:
        """Import the package `wandb`, which takes about a second.

        Raises TrackerMissing if the package is not installed.
        """
        _import_wandb()

    def write(self, items: Sequence[ChartItem], cursor: Cursor) -> None:
        """Write the points in `items` as rows, and then the state file. Rollbacks are left out,
        because wandb cannot discard rows.

        Raises TrackerMissing if wandb cannot be used. Raises WandbError if its run cannot be
        opened. Raises OSError if the disk fails.
        """
        rows = [_row(item) for item in items if isinstance(item, Point)]
        if not rows:
            return self._write_state(replace(self._state, cursor=cursor))
        self._send(rows)
        num_rows = self._state.num_rows + len(rows)
        self._write_state(WandbState(self._state.run_id, num_rows, cursor))

    def _send(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.load()  # without the package, nothing is written
        # Before wandb, which would write elsewhere if this folder could not be written.
        self._write_state(with_pending(self._state, rows))
        try:
            self._open()
            for number, row in enumerate(rows, self._state.num_rows):
                # Without `commit`, wandb would hold the row back until the next one.
                self._run.log(_with_table(row), step=number, commit=True)
            self._run.status()  # wandb answers when its own process has received all rows
        except BaseException:
            self.close()
            raise

    def clear(self) -> None:
        """Delete the folder of wandb's runs. The next rows belong to a new run of wandb. Runs on
        wandb's server stay."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._state = self._read_state()

    def close(self) -> None:
        """End wandb's run. Wait at most FINISH_TIMEOUT_S seconds until the rows are uploaded."""
        run, self._run = self._run, None
        if run is not None:
            with contextlib.suppress(Exception):  # the rows are in wandb's file
                run.finish()

    def _open(self) -> None:
        if self._run is not None:
            return
        for name in OWN_FOLDERS:
            os.environ.setdefault(f"WANDB_{name}_DIR", str(self._folder.resolve() / name.lower()))
        wandb = _import_wandb()
        try:
            run = wandb.init(
                dir=str(self._run_dir),
                id=self._state.run_id,
                resume="allow",
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=os.environ.get("WANDB_NAME") or self._run_dir.resolve().name,
                settings=wandb.Settings(**SETTINGS),
            )
        except Exception as error:  # wandb and the packages below it have many kinds
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise WandbError(f"{line} (set WANDB_MODE=offline to write files only)") from None
        if run.disabled:
            raise TrackerMissing("wandb is disabled by WANDB_MODE or by its settings.")
        self._run = run
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)

    def _read_state(self) -> WandbState:
        try:
            values = json.loads((self._folder / STATE_FILE).read_bytes())
            return WandbState(**values | {"cursor": Cursor(**values["cursor"])})
        except (OSError, ValueError, TypeError, KeyError):
            return WandbState(new_id())

    def _write_state(self, state: WandbState) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / STATE_FILE, json.dumps(asdict(state)))
        self._state = state


def _import_wandb() -> Any:
    # wandb reads this variable when it is imported. By default, it sends reports of its errors.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        module: Any = importlib.import_module("wandb")
        if not hasattr(module, "init"):  # Python takes any folder `wandb` for a package
            raise ImportError("there is only a folder of this name")
    except ImportError as error:
        raise TrackerMissing(
            f"The package `wandb` cannot be imported ({error}): run `pip install "
            "-e '.[wandb]'` in the clone of fakevllm, then restart the server."
        ) from None
    return module


def with_pending(state: WandbState, rows: Sequence[Mapping[str, object]]) -> WandbState:
    """Return the state before these rows are sent. `num_rows` is the number of the first one."""
    num, num_rows = state.num_pending, state.num_rows
    if num > len(rows) or _digest(rows[:num]) != state.pending_digest:
        num_rows += num  # other rows: the numbers of the pending ones may be taken
    return replace(state, num_rows=num_rows, num_pending=len(rows), pending_digest=_digest(rows))


def _digest(rows: Sequence[Mapping[str, object]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def _row(point: Point) -> dict[str, object]:
    """Return the point as a row of wandb's history, with the time of the point. A table is its
    columns and its data."""
    row: dict[str, object] = {
        **point.values,
        **point.texts,
        STEP: point.step,
        "_timestamp": point.at,
    }
    if point.table is not None:
        row[COMPLETIONS] = {"columns": [*COLUMNS], "data": point.table.data}
    return row


def _with_table(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row as wandb takes it: with the table as an object of wandb's class."""
    table = row.get(COMPLETIONS)
    if not isinstance(table, dict):
        return dict(row)
    return {**row, COMPLETIONS: _import_wandb().Table(**table)}
