"""The page that lists states and reasons, by the slugs with which they are stored and counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from types import ModuleType

from docs.reference_pages import docstrings
from docs.reference_pages.markdown import Page, code, prose, section, table
from fakevllm.admission.admission_rules import ServeOnlyReason
from fakevllm.groups import group_record
from fakevllm.groups.sibling_selection import Failure
from fakevllm.hooks.results import HookReason
from fakevllm.ledger import records
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.ledger.reasons import EndReason
from fakevllm.ledger.records import FeedbackState, State
from fakevllm.release import arms
from fakevllm.release.arms import Arm
from fakevllm.sessions.types import Evidence, Kind
from fakevllm_adapters.protocol import forgetting, run_finished
from fakevllm_adapters.protocol.keys import Role
from fakevllm_adapters.protocol.outage_reasons import OutageReason
from fakevllm_adapters.protocol.releases import Decision
from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.episodes import group_filter, job_identity
from fakevllm_server.journal import reads
from fakevllm_server.journal.tables import BatchState, EpisodeState, GroupState
from fakevllm_server.types.drop_reasons import DropReason

INTRODUCTION = """\
This page lists the states and reasons that ledger, journal, metrics and replies contain. \
[The ledger](../../fakevllm/ledger/README.md) has queries for them, \
[traffic.md](../traffic.md#why-a-request-was-not-trained) explains why some requests are not \
trained, and [algorithms.md](../algorithms.md#what-becomes-of-a-group) what becomes of groups at \
the server. \
A reason may have a detail after a colon, as in `skip_rule: private`."""
_ENUMS: Sequence[tuple[str, Sequence[type[StrEnum]]]] = (
    ("States of a group in the ledger", (State,)),
    ("Reasons of the proxy for groups that are not trained", (ServeOnlyReason, EndReason)),
    ("Reasons of hooks", (HookReason,)),
    ("Reasons of the server for groups that are not trained", (DropReason,)),
    ("Reasons why a model call gets no answer", (OutageReason,)),
    ("Failures of answers", (Failure,)),
    ("States of feedback", (FeedbackState,)),
    ("Roles of requests in their session", (Kind,)),
    ("Evidence for sessions", (Evidence,)),
    ("Arms of sessions", (Arm,)),
    ("Decisions about versions", (Decision,)),
    ("Causes of deleted contents", (Cause,)),
    ("States of the engine", (EngineStatus,)),
    ("Roles of API keys", (Role,)),
    ("States in the journal: episodes", (EpisodeState,)),
    ("States in the journal: groups", (GroupState,)),
    ("States in the journal: batches", (BatchState,)),
)
"""Titles of the sections, each with the classes whose values the section lists."""
_CONSTANTS: dict[type[StrEnum], Sequence[tuple[ModuleType, Sequence[str]]]] = {
    EndReason: (
        (arms, ("OTHER_ARM", "ARM_UNAVAILABLE")),
        (group_record, ("REDACTED", "NOT_SHOWN")),
    ),
    DropReason: (
        (group_filter, ("TIED", "REJECTED_VERSION", "UNVERIFIED", "NO_LOSS")),
        (job_identity, ("OTHER_JOB",)),
        (reads, ("CORRUPT",)),
        (run_finished, ("FINISHED",)),
        (forgetting, ("FORGOTTEN",)),
    ),
    Failure: ((records, ("BROKEN_OFF",)),),
}
"""Further values that are constants of modules, by the class with whose values they are listed."""
_LISTED = re.compile(r"^(\w+) {2,}(\S.*(?:\n {2,}\S.*)*)$", re.MULTILINE)
"""A value with its meaning in the docstring of a class."""


def page() -> Page:
    """Return the page with one section per kind of states or reasons."""
    return Page("States and reasons", INTRODUCTION, [_section(*one) for one in _ENUMS])


def _section(title: str, enums: Sequence[type[StrEnum]]) -> str:
    rows = [row for enum in enums for row in (*_members(enum), *_constants(enum))]
    introduction = "\n\n".join(_introduction(enum) for enum in enums)
    return section(title, prose(introduction), table(["value", "meaning"], rows))


def _introduction(enum: type[StrEnum]) -> str:
    """Return the docstring of an enumeration without the list of its values."""
    return docstrings.text_of(_LISTED.sub("", docstrings.cleaned(enum.__doc__)).strip())


def _members(enum: type[StrEnum]) -> list[list[str]]:
    listed = {
        name: docstrings.text_of(text)
        for name, text in _LISTED.findall(docstrings.cleaned(enum.__doc__))
    }
    below = docstrings.of_class(enum)
    rows: list[list[str]] = []
    for member in enum:
        meaning = below.get(member.name) or listed.get(member.value)
        if meaning is None:
            raise ValueError(f"{enum.__name__}.{member.name} has no docstring: write one below it")
        rows.append([code(member.value), prose(meaning)])
    return rows


def _constants(enum: type[StrEnum]) -> list[list[str]]:
    return [
        [code(vars(module)[name]), prose(docstrings.of_module(module)[name])]
        for module, names in _CONSTANTS.get(enum, ())
        for name in names
    ]
