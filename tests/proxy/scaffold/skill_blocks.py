"""The commands in the texts of the skills."""

from __future__ import annotations

import re
import textwrap

from fakevllm.scaffold.skills import SKILL_FILE, skills_folder


def skill_text(name: str) -> str:
    return (skills_folder() / name / SKILL_FILE).read_text(encoding="utf-8")


def shell_blocks(text: str) -> list[str]:
    """Return the fenced blocks of commands without the indentation of their list items."""
    found = re.findall(r"^( *)```sh\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]
