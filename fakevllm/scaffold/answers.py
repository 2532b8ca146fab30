"""The three questions of `fakevllm init`, and where their answers come from: flags, prompts or
defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from fakevllm.errors import ConfigError
from fakevllm.scaffold.apps import AppName
from fakevllm.scaffold.goods import GoodName

DEMO = "demo"
"""Name of the demo's model, which is part of fakevllm."""
MODEL_FILES = ("config.json", "*.safetensors")
"""Patterns of files that every model folder has. `fakevllm-server` checks the same patterns."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, with the check of its answer."""

    flag: str
    text: str
    default: str
    check: Callable[[str], str]
    """Function that returns the valid form of an answer, or raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Answers:
    app: AppName
    model: str
    """`demo`, or the absolute path of a model folder."""
    good: GoodName


Ask = Callable[[Question], str]
"""A function that asks the user a question, and returns the checked answer."""


def one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    """Return a check that accepts only the values in `names`."""

    def check(text: str) -> str:
        if text not in names:
            raise ConfigError(f"{text!r} is none of {', '.join(names)}.")
        return text

    return check


def checked_model(text: str) -> str:
    """Return `demo`, or the absolute path of a model folder. Raises ConfigError if the folder does
    not exist or contains no model."""
    if text == DEMO:
        return text
    try:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"The model folder {text!r} does not exist: give --model a local folder, or `demo`."
            )
        for pattern in MODEL_FILES:
            if not any(folder.glob(pattern)):
                raise ConfigError(
                    f"The folder {text!r} has no {pattern}: give --model a folder in Hugging Face "
                    "format, or `demo`."
                )
    except OSError as error:
        raise ConfigError(f"The model folder {text!r} cannot be read: {error.strerror}.") from None
    except RuntimeError:  # `~name` with an unknown name
        raise ConfigError(
            f"The home folder in {text!r} is unknown: write the whole path."
        ) from None
    return str(folder.resolve())


APPS: tuple[str, ...] = get_args(AppName)
KINDS: tuple[str, ...] = get_args(GoodName)
APP = Question("--app", f"Which app sends the requests ({', '.join(APPS)})", "openai", one_of(APPS))
MODEL = Question("--model", "Model folder, or demo", DEMO, checked_model)
GOOD = Question("--good", f"What makes an answer good ({', '.join(KINDS)})", "exact", one_of(KINDS))


def complete(
    app: str | None,
    model: str | None,
    good: str | None,
    *,
    takes_defaults: bool,
    ask: Ask | None,
) -> Answers:
    """Return the answers to all questions. A flag's value comes first, then the default if
    `takes_defaults`, then the user's answer to `ask`.

    `ask` is None if there is no terminal. Raises ConfigError if an answer is missing and the user
    cannot be asked, or if a flag's value is not valid.
    """

    def answer(question: Question, given: str | None) -> str:
        if given is not None:
            return question.check(given)
        if takes_defaults:
            return question.default
        if ask is None:
            raise ConfigError(
                f"{question.flag} is missing, and there is no terminal to ask: pass "
                f"{question.flag}, or --yes for the default ({question.default})."
            )
        return ask(question)

    # All flags are checked before the first question is asked.
    given = [(APP, app), (MODEL, model), (GOOD, good)]
    checked = [None if value is None else question.check(value) for question, value in given]
    names = [answer(question, value) for (question, _), value in zip(given, checked, strict=True)]
    return Answers(cast(AppName, names[0]), names[1], cast(GoodName, names[2]))
