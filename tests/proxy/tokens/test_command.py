"""`fakevllm tokens` with a real ledger: selecting groups, texts of tokens, and error messages."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.errors import UserError
from fakevllm.ledger.store import Ledger
from fakevllm.tokens import detokenizer
from fakevllm.tokens.colours import ColourBy
from fakevllm.tokens.command import TokensSettings, run_tokens
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from tests.proxy.ledger.ledger_cases import group, trained
from tests.proxy.tokens import pages

DEAD_URL = "http://127.0.0.1:9"


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


def output_of(
    ledger: Path,
    episode: str | None = None,
    *,
    model: Path | None = None,
    html: Path | None = None,
) -> str:
    console = Console(file=io.StringIO(), width=100)
    by = ColourBy.ADVANTAGE
    run_tokens(TokensSettings(episode, ledger, DEAD_URL, None, model, html, by), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_an_id_the_last_trained_group_is_shown(ledger: Path) -> None:
    text = output_of(ledger)
    assert "group abc1" in text and "trained, step 4" in text
    assert "advantage +0.5" in text and "advantage -0.5" in text


def test_a_group_or_a_sibling_is_selected_by_the_beginning_of_its_id(ledger: Path) -> None:
    assert "group abd2" in output_of(ledger, "abd")
    text = output_of(ledger, "abc/1")
    assert "sibling 1" in text and "sibling 0" not in text


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        ("ab", "write more characters"),
        ("abc/9", "no such sibling"),
        ("elsewhere", "no server answers at http://127.0.0.1:9"),
    ],
)
def test_an_id_without_a_group_is_an_error_with_the_fix(
    ledger: Path, episode: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        output_of(ledger, episode)


def test_an_empty_or_missing_ledger_is_an_error_with_the_fix(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "empty").close()
    for name, problem in (("empty", "has no group with tokens"), ("none", "does not exist")):
        with pytest.raises(UserError, match=f"{problem}: name a proxy's run directory"):
            output_of(tmp_path / name)


def test_without_an_engine_ids_are_shown_with_the_reason(ledger: Path) -> None:
    text = output_of(ledger)
    assert "[3] [4]" in text
    assert "Texts are missing" in text and "--model" in text


def test_texts_come_from_the_models_own_tokenizer(ledger: Path) -> None:
    text = output_of(ledger, "abc1", model=DEMO_MODEL_DIR)
    assert "[3]" not in text and "Texts are missing" not in text
    texts = detokenizer.texts_from_folder(DEMO_MODEL_DIR, [2, 271])
    assert texts == {2: "<|im_end|>", 271: " plus"}


def test_a_folder_without_a_tokenizer_is_refused(ledger: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        output_of(ledger, model=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        output_of(ledger, model=tmp_path)


def test_without_the_package_ids_are_shown_with_the_package_to_install(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(detokenizer.importlib, "import_module", missing)
    assert "pip install tokenizers" in output_of(ledger, model=DEMO_MODEL_DIR)


def test_only_its_owner_can_read_the_page(ledger: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert str(file) in output_of(ledger, html=file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert "group abc1" in file.read_text()
    with pytest.raises(UserError, match="cannot be written"):
        output_of(ledger, html=tmp_path)
