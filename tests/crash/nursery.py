"""Lives are forked from one process that has imported all they need: an import of the server takes
a second, a life a third of that. What dies at a crash point is a process all the same.

    python -m crash.nursery crash.life
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from crash.power import Power

from fakevllm_server.types import crash_points

LIMIT_S = 40
"""A life that hangs is ended, and so told apart from one that crashed."""
LOG, LABELS = "life.log", "labels.txt"


class Nursery:
    """Closed when left."""

    def __init__(self, module: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.nursery", module],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def live(self, run_dir: Path, crash_at: str | None = None, **options: Any) -> int:
        """The exit status of one life; `options` go to the module's `main`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        run_dir.mkdir(exist_ok=True)
        order = {"run_dir": str(run_dir), "crash_at": crash_at, "options": options}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def crash(self, run_dir: Path, at: str, **options: Any) -> None:
        """A life that must end there."""
        status = self.live(run_dir, at, **options)
        assert status == crash_points.EXIT_CODE, f"{at}: {_told(run_dir, status)}"

    def finish(self, run_dir: Path, **options: Any) -> None:
        """A life that must come to the script's end."""
        status = self.live(run_dir, **options)
        assert status == 0, _told(run_dir, status)


def labels_of(run_dir: Path) -> list[str]:
    """Passed in the lives that did not crash."""
    return (run_dir / LABELS).read_text().splitlines()


def _told(run_dir: Path, status: int) -> str:
    return f"ended with {status}\n" + (run_dir / LOG).read_text()[-4000:]


def _serve(module: str) -> None:
    main = importlib.import_module(module).main
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _live(main, json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # an interpreter that holds torch takes seconds to end


def _live(main: Any, order: dict[str, Any]) -> None:
    """Never returns."""
    run_dir = Path(order["run_dir"])
    signal.alarm(LIMIT_S)
    log = os.open(run_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    passed: list[str] = []
    power = Power(run_dir / "checkpoints")
    power.watch()
    crash_at = order["crash_at"]
    crash_points.on_pass = (
        passed.append if crash_at is None else crash_points.exit_at(crash_at, power.cut)
    )
    try:
        main(run_dir, **order["options"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    (run_dir / LABELS).write_text("\n".join(passed))
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
