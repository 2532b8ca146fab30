"""All ready hooks: they load by path, run on the made-up group, and are in the README's table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fakevllm.hooks.check import check

FOLDER = Path(__file__).parents[2] / "reward_hooks"
HOOKS = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", HOOKS, ids=[path.stem for path in HOOKS])
def test_a_ready_hook_is_in_the_table_and_imports_only_the_contract(path: Path) -> None:
    assert f"| `{path.name}` |" in (FOLDER / "README.md").read_text()
    nodes = ast.walk(ast.parse(path.read_text()))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    ours = {module for module in modules if module and module.startswith("fakevllm")}
    assert ours == {"fakevllm.hooks.spec"}


@pytest.mark.parametrize("name", ["exact_match", "length_format"])
async def test_a_ready_hook_scores_the_made_up_answers(name: str) -> None:
    report = await check(FOLDER / f"{name}.py")
    assert report.ok
    assert report.outcome.rewards == [1.0, 0.0, 0.0, 0.0]


async def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    _, _, after = (FOLDER / "README.md").read_text().partition("```python\n")
    (tmp_path / "on_compute_relative_reward.py").write_text(after.partition("```")[0])
    report = await check(tmp_path)
    assert report.outcome.rewards == [1.0, 0.0, 0.0, 0.0]
