"""Reads the groups of a training step from the journal, decodes their token ids, and makes the
table of samples of the step.

The journal has token ids only. They are decoded with the model's own tokenizer, in the process of
the tracker: no engine is asked, and neither requests nor training wait. Texts are redacted before
they are shortened. If the texts of a step cannot be had, its table is missing, and its curves are
not.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.redactor import Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.swarm import LogEntry, TrainedGroup
from fakevllm_server.backends.fake import byte_tokens
from fakevllm_server.config.sample_tables import SampleTableSettings
from fakevllm_server.curves.sample_tables import MAX_CHARS, SampleRow, SampleTable, shortened
from fakevllm_server.forest.call_text_comparison import Decode
from fakevllm_server.journal import reads
from fakevllm_server.journal.external_reader import read_journal_file
from fakevllm_server.journal.store import JOB
from fakevllm_server.run.model_identity import read_recorded_model
from fakevllm_server.run.tokenizer_reader import load_vocabulary
from fakevllm_server.types.calls import FinishedGroup, RecordedCall

log = logging.getLogger("fakevllm.server")


class TextsUnavailable(Exception):
    """Error for token ids that cannot be decoded. Its message has one line."""


@dataclass(frozen=True, slots=True)
class SampleRules:
    """The server's settings for tables of samples, which a tracker's process gets as JSON."""

    settings: SampleTableSettings
    privacy: PrivacySettings
    """What the server redacts, in addition to what the job says."""

    def to_json(self) -> str:
        return json.dumps([asdict(self.settings), self.privacy.model_dump(mode="json")])

    @staticmethod
    def from_json(text: str) -> SampleRules:
        settings, privacy = json.loads(text)
        return SampleRules(SampleTableSettings(**settings), PrivacySettings.model_validate(privacy))


class SampleReader:
    """Makes the tables of samples of one run."""

    def __init__(self, run_dir: Path, rules: SampleRules) -> None:
        self._run_dir = run_dir
        self._journal = run_dir / "journal.sqlite"
        self._settings = rules.settings
        self._privacy = rules.privacy
        self._decode: Decode | None = None
        self._last_problem: str | None = None

    def is_due(self, entry: LogEntry) -> bool:
        """Return True if a table is written for an entry of the run log."""
        return entry.kind == "step" and self._settings.is_due(entry.step)

    def table(self, entry: LogEntry) -> SampleTable | None:
        """Return the table of a step of the run log, or None if no table is due at this step.

        Raises ConfigError if the journal cannot be read.
        """
        if not self.is_due(entry):
            return None
        trained, groups, num_missing = self._read(entry)
        # Isolated: a step without a table is better than no curves.
        try:
            redactor, decode = self._redactor(), self._decoder()
            rows = [
                row
                for number, (one, group) in enumerate(zip(trained, groups, strict=True), 1)
                for row in _rows(entry.step, number, one, group, redactor, decode)
            ]
        except Exception as problem:
            self._log_once(str(problem) or repr(problem))
            return SampleTable([], num_missing + len(groups))
        return SampleTable(rows, num_missing)

    def _read(self, entry: LogEntry) -> tuple[list[TrainedGroup], list[FinishedGroup], int]:
        """Read the first groups of a step whose answers were sampled. Return them, and the number
        of groups whose calls are not in the journal any more."""
        trained: list[TrainedGroup] = []
        groups: list[FinishedGroup] = []
        num_missing = 0
        for one in entry.groups:
            if len(groups) + num_missing == self._settings.num_groups:
                break
            group = read_journal_file(self._journal, reads.trained_group, one.group_id)
            if group is None:
                num_missing += 1
            elif group.demonstrates is None:  # a user's edit was not sampled
                trained.append(one)
                groups.append(group)
        return trained, groups, num_missing

    def _redactor(self) -> Redactor:
        """Return a redactor with the present settings of server and job. Calls with matches have no
        tokens, unless they were recorded before redaction was turned on."""
        job_yaml = read_journal_file(self._journal, reads.meta, JOB)
        job = TrainJob() if job_yaml is None else TrainJob.from_yaml(job_yaml)
        return self._privacy.union(job.privacy_or_default).redactor

    def _decoder(self) -> Decode:
        if self._decode is None:
            recorded = read_recorded_model(self._run_dir)
            if recorded is None:
                raise TextsUnavailable("the run has no model.json")
            if recorded.trainer == "fake":
                self._decode = partial(byte_tokens.decode, skip_special_tokens=False)
            else:
                self._decode = load_vocabulary(recorded.model).decode
            if self._decode is None:
                raise TextsUnavailable(
                    f"the tokenizer of {recorded.model} cannot be read: a model folder with "
                    "`tokenizer.json` and the package `tokenizers` are needed"
                )
        return self._decode

    def _log_once(self, problem: str) -> None:
        if problem != self._last_problem:
            log.warning("Tables of samples cannot be written: %s", problem.splitlines()[0])
        self._last_problem = problem


def _rows(
    step: int,
    number: int,
    trained: TrainedGroup,
    group: FinishedGroup,
    redactor: Redactor,
    decode: Decode,
) -> Iterator[SampleRow]:
    """Yield a row for each episode of a group that has a call: its last call, whose prompt has the
    calls before."""
    advantages = dict(zip(trained.siblings, trained.advantages, strict=False))
    for episode in group.episodes:
        if not episode.calls:
            continue
        prompt, completion = _texts(episode.calls[-1], redactor, decode)
        advantage = advantages.get(episode.index)
        yield SampleRow(
            step, number, prompt, completion, _finite(episode.reward), _finite(advantage)
        )


def _texts(call: RecordedCall, redactor: Redactor, decode: Decode) -> tuple[str, str]:
    """Return the texts of the prompt and of the answer. A call without tokens, such as a redacted
    one, has the reason in place of the answer."""
    if not call.response_ids and call.untrainable is not None:
        return "", f"[{call.untrainable}]"
    prompt = redactor.text(decode(call.prompt_ids))
    completion = redactor.text(decode(call.response_ids))
    completion = redactor.continued(prompt[-MAX_CHARS:], completion)
    return shortened(prompt), shortened(completion)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
