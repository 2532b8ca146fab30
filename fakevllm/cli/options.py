"""Command-line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="Configuration file. Default: ./fakevllm.toml, if it exists."),
]
RunDir = Annotated[
    Path | None,
    # Without `readable`, typer's own message would come first, which does not say what to do.
    typer.Option("--run-dir", readable=False, help="Run directory of the proxy, with its ledger."),
]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="Ledger file. Default: the one in --run-dir.")
]
Where = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="Condition on the columns of the ledger's view `groups`."),
]
LoggedDataset = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        help="Dataset file with the rows that the requests were made from. Default: dataset.file.",
    ),
]
ProxyUrl = Annotated[
    str | None,
    typer.Option(help="URL of the proxy. Default: the address in the configuration file."),
]
ProxyKey = Annotated[str | None, typer.Option(envvar="FAKEVLLM_KEY", help="API key for the proxy.")]
SwarmKey = Annotated[
    str | None, typer.Option(envvar="FAKEVLLM_SWARM_KEY", help="API key for the swarm server.")
]
EnginePair = Annotated[
    str, typer.Option("--backend", help="Pair of engines: embedded | vllm | verl | fake.")
]
RolloutEngine = Annotated[
    str | None,
    typer.Option("--rollout", help="Engine that samples, instead of the pair's: embedded | vllm."),
]
Trainer = Annotated[
    str | None,
    typer.Option("--trainer", help="Engine that trains, instead of the pair's: embedded | verl."),
]
TrainerArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--trainer-arg",
        help="Extra argument for the trainer, as --trainer-arg=ARG; repeatable.",
    ),
]
