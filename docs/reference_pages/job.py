"""The page that lists the settings of a training job, in all their spellings."""

from __future__ import annotations

from docs.reference_pages import docstrings
from docs.reference_pages.fields import HEAD, rows_of
from docs.reference_pages.markdown import Page, code, prose, section, table
from docs.reference_pages.serve_flags import serve_flags
from fakevllm_adapters.job import ajet_settings, ajet_yaml
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.job.unused_settings import NEVER_USED
from fakevllm_server.backends.vllm.command import JOB_ARGUMENTS

INTRODUCTION = """\
This page lists every setting of a training job, with its type, default and unit. \
[The job](../job.md) explains AgentJet's defaults, the engines that support each setting, and \
which settings contradict each other. [algorithms.md](../algorithms.md) has the formulas. \
A setting has one name in three places: as a key of `[job]` in `fakevllm.toml`, as a key below \
`job:` in YAML, and as an argument of the SDK's `TrainJob`. \
A setting without *AgentJet's key* does not exist in AgentJet's YAML. A setting that has the \
default *none* is not set."""
SPELLINGS = """\
These keys and flags are accepted as other spellings of a setting:"""
_SYNONYMS = {
    "target_modules": ("`lora_target_modules` in TOML, YAML and the SDK",),
    "kl_loss_coef": (
        "`use_kl_loss` (true or false) in TOML, YAML and the SDK",
        f"`{ajet_yaml.USE_KL_LOSS_KEY}` in AgentJet's YAML",
    ),
}
"""Synonyms that the validators of `TrainJob` accept."""


def page() -> Page:
    """Return the page with one section for fakevllm's settings and one for those of AgentJet."""
    shared = ajet_settings.SwarmSections.model_fields.keys()
    own = [name for name in TrainJob.model_fields if name not in shared]
    return Page(
        "Keys of the job",
        INTRODUCTION,
        [
            section("What to train and how", _settings(own)),
            section("Settings for compatibility with AgentJet", _settings(list(shared))),
            section("Other spellings", SPELLINGS, _other_spellings()),
            section(
                "Keys of AgentJet that are not read",
                prose(docstrings.of_module(ajet_yaml)["IGNORED_KEYS"]),
                _ignored_keys(),
            ),
        ],
    )


def _settings(names: list[str]) -> str:
    rows = {row.name: row for row in rows_of(TrainJob)}
    cells = [
        [
            code(name),
            *rows[name].cells,
            code(ajet_yaml.AJET_KEYS[name]) if name in ajet_yaml.AJET_KEYS else "",
            _effect(name),
        ]
        for name in names
    ]
    return table(["setting", *HEAD, "AgentJet's key", "effect"], cells)


def _effect(name: str) -> str:
    """Return what limits the effect of a setting; empty if it has its full effect."""
    arguments = [flag for flag, setting in JOB_ARGUMENTS.items() if setting == name]
    if arguments:
        return f"vLLM's argument {code(arguments[0])}"
    return f"no effect: {prose(NEVER_USED[name])}" if name in NEVER_USED else ""


def _other_spellings() -> str:
    older = {
        name: (f"`{key}` in older YAML of AgentJet",) for name, key in ajet_yaml.OLDER_KEYS.items()
    }
    flags = {
        key.removeprefix("job."): (f"the flag {code(flag)} of `fakevllm serve`",)
        for key, flag in serve_flags().items()
        if key.startswith("job.")
    }
    rows = [
        [code(name), spelling]
        for names in (flags, _SYNONYMS, older)
        for name, spellings in names.items()
        for spelling in spellings
    ]
    return table(["setting", "other spelling"], rows)


def _ignored_keys() -> str:
    rows = [
        [code(one.key), " or ".join(code(value) for value in one.silent), prose(one.instead)]
        for one in ajet_yaml.IGNORED_KEYS
    ]
    return table(["AgentJet's key", "values without a warning", "what counts instead"], rows)
