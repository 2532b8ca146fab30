"""Write skills (instructions for coding assistants) into the folders that the assistants read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from fakevllm.errors import ConfigError

SKILL_FILE = "SKILL.md"
ASSISTANT_FOLDERS = (".claude/skills", ".opencode/skills")
"""Folders in which Claude Code and opencode look for a project's skills. opencode also looks in the
first one, unless its user has turned that off."""

_IN_WHEEL = Path(__file__).parent / "assistant_skills"
_IN_CLONE = Path(__file__).parents[2] / "skills"


def skills_folder() -> Path:
    """Return the folder with one folder per skill. The build copies `skills` into the wheel; in a
    clone, the folder itself is used."""
    return _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CLONE


def skill_names() -> list[str]:
    """Return the names of all skills."""
    return sorted(source.parent.name for source in skills_folder().glob(f"*/{SKILL_FILE}"))


def skill_files() -> dict[str, str]:
    """Return the files of all skills in a project, as a dict from path to text."""
    return {
        f"{folder}/{name}/{SKILL_FILE}": (skills_folder() / name / SKILL_FILE).read_text("utf-8")
        for folder in ASSISTANT_FOLDERS
        for name in skill_names()
    }


def add_files(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write the missing files into an existing folder, and return the paths of these files.

    Raises ConfigError if a file exists with another text, or cannot be written. In both cases, the
    folder has no new files.
    """
    missing = [path for path, text in texts.items() if not _is_there(folder / path, text)]
    with contextlib.ExitStack() as undo:
        for path in missing:
            file = folder / path
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("xb") as written:
                    undo.callback(file.unlink, missing_ok=True)
                    written.write(texts[path].encode())
            except OSError as error:
                raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
        undo.pop_all()
    return missing


def _is_there(file: Path, text: str) -> bool:
    """Return True if the file exists with this text. Raises ConfigError if it has another text."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}. Nothing was written."
        ) from None
    if content != text.encode():
        raise ConfigError(
            f"{file} differs from this version's skill: rename or delete it, and run the command "
            "again. Nothing was written."
        )
    return True
