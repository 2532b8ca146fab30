"""The files of a new project, made from the templates and the user's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from fakevllm.scaffold.answers import DEMO, Answers
from fakevllm.scaffold.apps import ALIASES, configurations_folder
from fakevllm.scaffold.goods import GOODS

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".template"
"""Ending of a template with placeholders such as $model. All other files are copied as they are."""
IGNORE_FILE = "gitignore"
"""Name of the template of `.gitignore`. With the dot, git would obey the template itself."""
MEASURE_FILE = "measure.md"
"""Section of the README that says how to measure the model. A kind of reward may have its own."""
INDENT = "    "
NEXT_COMMANDS = ("fakevllm up", "python mock_user_request.py")
"""The commands that start the project. Each runs in a terminal of its own."""


def project_files(name: str, answers: Answers) -> dict[str, str]:
    """Return the files of a new project, as a dict from path to text. `name` is the name of the
    project's folder."""
    good = TEMPLATES / "good" / answers.good
    app = TEMPLATES / "apps" / answers.app
    written = dict(_texts(TEMPLATES / "project")) | dict(_texts(good / "files"))
    for folder in (configurations_folder() / answers.app, app / "files"):
        written |= {f"app/{path}": text for path, text in _texts(folder)}
    written[GOODS[answers.good].path] = _reward_hook(answers)
    written[".gitignore"] = written.pop(IGNORE_FILE)
    values = {
        "name": name,
        "model": _toml_string(answers.model),
        "alias": ALIASES[answers.app],
        "commands": "\n".join(INDENT + line for line in NEXT_COMMANDS),
        "app": _about(app),
        "good": _about(good),
        "measure": (_text_if_any(good / MEASURE_FILE) or _text(TEMPLATES / MEASURE_FILE)).strip(),
        "sections": _text_if_any(good / "sections.toml"),
        "job": _job(answers),
    }
    return {path.removesuffix(SUFFIX): _fill(path, text, values) for path, text in written.items()}


def _fill(path: str, text: str, values: Mapping[str, str]) -> str:
    return Template(text).substitute(values) if path.endswith(SUFFIX) else text


def _about(variant: Path) -> str:
    return Template(_text(variant / f"about.md{SUFFIX}")).substitute().strip()


def _toml_string(text: str) -> str:
    """Return a text as a TOML string. JSON has the same escapes, but does not escape DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _job(answers: Answers) -> str:
    kind = "demo" if answers.model == DEMO else "model"
    extra = _text_if_any(TEMPLATES / "good" / answers.good / "job.toml")
    return _text(TEMPLATES / "job" / f"{kind}.toml") + extra


def _reward_hook(answers: Answers) -> str:
    good = GOODS[answers.good]
    text = _text(files("reward_hooks") / good.ready_hook)
    for old, new in good.edits:
        assert text.count(old) == 1, f"{good.ready_hook} must contain once: {old}"
        text = text.replace(old, new)
    return text


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file below a folder. The folder may be missing."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(folder).as_posix(), _text(path)


def _text(path: Path | Traversable) -> str:
    return path.read_text(encoding="utf-8")


def _text_if_any(path: Path) -> str:
    return _text(path) if path.is_file() else ""
