"""The sections of RESULTS.md are replaced one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import results


def test_a_section_is_replaced_in_the_file_that_the_module_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "RESULTS.md"
    file.write_text("# Results\n\n## A\n\nold\n\n## B\n\nkept\n")
    before = results.RESULTS.read_bytes()
    own = results.RESULTS
    monkeypatch.setattr(results, "RESULTS", file)
    results.replace_section("A", "new")
    assert file.read_text() == "# Results\n\n## A\n\nnew\n\n## B\n\nkept\n"
    assert own.read_bytes() == before
