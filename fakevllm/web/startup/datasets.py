"""Read the rows of the training dataset and the held-out rows, and compare them."""

from __future__ import annotations

import logging

from fakevllm.admission.dataset import read_tasks
from fakevllm.admission.held_out import NUM_SAFE_CHARS, HeldOutRows
from fakevllm.admission.row_requests import read_held_out_rows
from fakevllm.config.model import Config, DatasetSection
from fakevllm.errors import ConfigError
from fakevllm.runtime.plurals import counted
from fakevllm_adapters.protocol.swarm import Task

log = logging.getLogger("fakevllm.web.startup")


def dataset_rows(dataset: DatasetSection) -> list[Task]:
    """Return the rows of the training dataset; [] without a dataset. Raise ConfigError if its file
    cannot be read."""
    return read_tasks(dataset.file, dataset.field) if dataset.file is not None else []


def held_out_rows(config: Config, rows: list[Task]) -> HeldOutRows:
    """Return the held-out rows, which are used only for evaluations. Raise ConfigError if the
    held-out file has no rows. Raise ConfigError if the training dataset contains a held-out row,
    because a held-out row must not be trained."""
    file = config.release.eval_dataset
    if file is None:
        return HeldOutRows()
    held_out = read_held_out_rows(file, config.dataset.field)
    if overlap := held_out.overlapping(rows):
        are, them = ("is", "it") if len(overlap) == 1 else ("are", "them")
        raise ConfigError(
            f"{counted(len(overlap), 'row')} of the dataset {config.dataset.file} {are} held out "
            f"by release.eval_dataset {file} (the first: {overlap[0].main_query[:60]!r}): take "
            f"{them} out of one of the two files."
        )
    if short := held_out.short:
        log.warning(
            "%s of the held-out dataset %s %s less than %d characters (the first: %r): no "
            "request that contains such a text is trained, so write longer rows",
            counted(len(short), "row"),
            file,
            "has" if len(short) == 1 else "have",
            NUM_SAFE_CHARS,
            short[0],
        )
    return held_out
