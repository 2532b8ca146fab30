"""`fakevllm tokens` on a real ledger: what is found, with which texts, and what is said if not."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.errors import UserError
from fakevllm.ledger.store import Ledger
from fakevllm.tokens import texts
from fakevllm.tokens.colours import By
from fakevllm.tokens.command import TokensSettings, run_tokens
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from tests.proxy.ledger.ledger_cases import group, trained
from tests.proxy.tokens import pages

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    file = tmp_path / "ledger.sqlite"
    opened = Ledger.open(file)
    for name in ("abc1", "abd2"):
        opened.record(group(name))
        opened.settle(name, "pooled", None, 1, [[pages.call()], [pages.call()]], "run")
    opened.apply_log("run", [trained(1, "abc1", step=4, advantages=[0.5, -0.5])])
    opened.close()
    return file


def shown(
    ledger: Path,
    episode: str | None = None,
    *,
    model: Path | None = None,
    html: Path | None = None,
) -> str:
    console = Console(file=io.StringIO(), width=100)
    run_tokens(TokensSettings(episode, ledger, NOBODY, None, model, html, By.ADVANTAGE), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_name_the_last_trained_group_is_shown(ledger: Path) -> None:
    text = shown(ledger)
    assert "group abc1" in text and "trained, step 4" in text
    assert "advantage +0.5" in text and "advantage -0.5" in text


def test_a_group_or_a_sibling_is_found_by_how_its_id_begins(ledger: Path) -> None:
    assert "group abd2" in shown(ledger, "abd")
    text = shown(ledger, "abc/1")
    assert "sibling 1" in text and "sibling 0" not in text


@pytest.mark.parametrize(
    ("episode", "mend"),
    [
        ("ab", "give more of its id"),
        ("abc/9", "no such sibling"),
        ("elsewhere", "no server answers at http://127.0.0.1:9"),
    ],
)
def test_what_is_not_found_is_told_with_the_mend(ledger: Path, episode: str, mend: str) -> None:
    with pytest.raises(UserError, match=mend):
        shown(ledger, episode)


def test_an_empty_ledger_and_none_are_told(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "empty").close()
    for name, told in (("empty", "has no group with tokens"), ("none", "does not exist")):
        with pytest.raises(UserError, match=f"{told}: name a proxy's run with --run-dir"):
            shown(tmp_path / name)


def test_without_an_engine_there_are_ids_and_a_word_why(ledger: Path) -> None:
    text = shown(ledger)
    assert "[3] [4]" in text
    assert "ids without texts" in text and "--model" in text


def test_texts_are_those_of_the_models_own_tokenizer(ledger: Path) -> None:
    text = shown(ledger, "abc1", model=DEMO_MODEL_DIR)
    assert "[3]" not in text and "ids without texts" not in text
    spelt = texts.of_folder(DEMO_MODEL_DIR, [2, 271])
    assert spelt == {2: "<|im_end|>", 271: " plus"}


def test_a_folder_without_a_tokenizer_is_refused(ledger: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        shown(ledger, model=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        shown(ledger, model=tmp_path)


def test_without_the_package_there_are_ids_and_what_to_install(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(texts.importlib, "import_module", missing)
    assert "pip install tokenizers" in shown(ledger, model=DEMO_MODEL_DIR)


def test_the_page_is_its_owners_alone(ledger: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert str(file) in shown(ledger, html=file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "group abc1" in file.read_text()
    with pytest.raises(UserError, match="cannot be written"):
        shown(ledger, html=tmp_path)
