"""Without Ray or a known verl the trainer refuses, in one line that says what to do."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

import pytest

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.child import ChildEngine
from fakevllm_server.backends.verl.installed import check_installed
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec


def test_a_known_verl_is_taken() -> None:
    check_installed({"ray": "2.60.0", "verl": "0.9.1"}.__getitem__)


@pytest.mark.parametrize("missing", ["ray", "verl"])
def test_what_is_missing_is_named_with_how_to_install_it(missing: str) -> None:
    def version_of(package: str) -> str:
        if package == missing:
            raise metadata.PackageNotFoundError(package)
        return "0.9.1"

    with pytest.raises(BackendRefused, match=rf"needs {missing}, .*pip install -e '\.\[verl\]'"):
        check_installed(version_of)


def test_an_unknown_verl_is_named_with_its_version() -> None:
    with pytest.raises(BackendRefused, match=r"knows verl 0\.9\.x, and 0\.10\.0 is installed"):
        check_installed({"ray": "2.60.0", "verl": "0.10.0"}.__getitem__)


@pytest.mark.skipif(util.find_spec("ray") is not None, reason="Ray is installed here")
async def test_the_server_is_told_that_only_the_user_can_mend_it(tmp_path: Path) -> None:
    trainer = ChildEngine(
        EngineSpec("verl", tmp_path, str(DEMO_MODEL_DIR), "demo", train_only=True)
    )
    with pytest.raises(BackendRefused, match=r"make_environment\.sh FOLDER`$"):
        await trainer.launch()
    await trainer.close()
