"""The page that lists the files in run directories.

A test runs the demo and finds each of its files in `RUN_FILES`.
"""

from __future__ import annotations

from dataclasses import dataclass

from docs.reference_pages.markdown import Page, code, section, table
from fakevllm.admission import kill_switch
from fakevllm.processes import pid_file
from fakevllm.up import detached
from fakevllm_server.backends.vllm import capability_probe, held_adapters
from fakevllm_server.curves import event_files, wandb_run
from fakevllm_server.run import run_choice

INTRODUCTION = """\
This page lists the files that proxy and server write into their run directories. Both may use the \
same directory. [The server's page](../../server/README.md#the-run-directory) explains which files \
belong to which run. The mode of the server's directory is 0700. SQLite keeps files with the \
endings `-wal` and `-shm` beside an open database."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file or folder of a run directory."""

    pattern: str
    """Path below the run directory; `*` matches any text."""
    content: str
    """Markdown that says what the file contains."""


RUN_FILES: dict[str, tuple[RunFile, ...]] = {
    "The proxy": (
        RunFile("ledger.sqlite", "[The ledger](ledger.md): every request and what became of it."),
        RunFile("ledger.sqlite.lock", "A lock that keeps a second proxy away."),
        RunFile("keys", "API keys of apps, unless `proxy.key_file` names another file."),
        RunFile(
            kill_switch.FILE_NAME,
            "Exists while the [kill switch](../traffic.md#the-kill-switch) is on.",
        ),
    ),
    "The server": (
        RunFile(
            "journal.sqlite",
            "[The journal](journal.md): everything that the server has "
            "acknowledged, and what became of it.",
        ),
        RunFile("lock", "A lock that keeps a second server away."),
        RunFile("run_id", "Id of the run, by which proxies recognise it."),
        RunFile("run.json", "Experiment name, job, seeds and versions of the run, for people."),
        RunFile(
            "model.json", "Trainer and model of the run. A start with another model is refused."
        ),
        RunFile(
            "checkpoints/step-*/*",
            "The last three [checkpoints](../checkpoints.md), the best "
            "one, and those of the released version and the candidate, as safetensors and JSON.",
        ),
        RunFile(f"{event_files.FOLDER}/*", "[Curves](../records.md#curves) for TensorBoard."),
        RunFile(
            f"{wandb_run.FOLDER}/*",
            "Curves for [wandb](../records.md#wandb), in wandb's own files.",
        ),
        RunFile(
            f"{event_files.FOLDER}.lock",
            "With [tables of samples](../records.md#tables-of-samples): a lock that keeps a second "
            "process from writing curves for TensorBoard.",
        ),
        RunFile(
            f"{wandb_run.FOLDER}.lock",
            "A lock that keeps a second process from writing curves for wandb.",
        ),
        RunFile("engine.log", "Log of the engine's process."),
        RunFile("trainer.log", "Log of the trainer's process."),
        RunFile(
            "engine-*.sock",
            "Socket of the engine's process. If the path is too long for a "
            "socket, the socket is in a private temporary folder.",
        ),
        RunFile("trainer-*.sock", "Socket of the trainer's process."),
        RunFile(
            f"{run_choice.RUNS}/*/",
            "[Runs of other experiments](../agents.md#experiments), "
            "each with the files of this table.",
        ),
        RunFile(
            "current_run", "Folder of the current run. Without this file, it is the run at the top."
        ),
        RunFile(capability_probe.PROBE_FILE, "Results of the probes of vLLM."),
        RunFile(
            held_adapters.FILE_NAME,
            "Digest of the vLLM, its arguments and the "
            "[adapters](../engines.md#versions-as-adapters) that it has held.",
        ),
        RunFile("train_code/*", "Training code that clients have uploaded. It is never run."),
    ),
    "`fakevllm up` and `fakevllm demo`": (
        RunFile(pid_file.NAME, "Process that `fakevllm down` stops."),
        RunFile(detached.LOG_NAME, "Output of `fakevllm up --detach`."),
        RunFile("server.log", "Output of the server that the demo has started."),
        RunFile("proxy.log", "Output of the proxy that the demo has started."),
        RunFile("fakevllm.toml", "Configuration of the demo's proxy."),
        RunFile("engines.json", "Engines of the demo. A resumed demo must have the same ones."),
        RunFile("held_out.jsonl", "Held-out rows of `fakevllm demo --gated`."),
        RunFile("planted.json", "Steps of `fakevllm demo --plant-bad-step`."),
        RunFile("probe_*.json", "Accuracy of the demo's model before and after training."),
        RunFile("curve.png", "Learning curve of the demo."),
    ),
}
"""Files by the program that writes them."""


def page() -> Page:
    """Return the page with one section per program."""
    return Page(
        "Files of a run",
        INTRODUCTION,
        [
            section(
                title,
                table(["file", "content"], [[code(one.pattern), one.content] for one in files]),
            )
            for title, files in RUN_FILES.items()
        ],
    )
