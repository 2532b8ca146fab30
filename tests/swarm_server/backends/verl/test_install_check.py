"""Without Ray or a tested verl, the trainer refuses to start and names the install command."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path

import pytest

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.child_engine import ChildEngine
from fakevllm_server.backends.verl.install_check import check_installed
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec


def test_a_tested_verl_is_accepted() -> None:
    check_installed({"ray": "2.60.0", "verl": "0.9.1"}.__getitem__)


@pytest.mark.parametrize("missing", ["ray", "verl"])
def test_a_missing_package_is_named_with_the_install_command(missing: str) -> None:
    def version_of(package: str) -> str:
        if package == missing:
            raise metadata.PackageNotFoundError(package)
        return "0.9.1"

    with pytest.raises(BackendRefused, match=rf"needs {missing}, .*pip install -e '\.\[verl\]'"):
        check_installed(version_of)


def test_an_untested_verl_is_named_with_its_version() -> None:
    with pytest.raises(BackendRefused, match=r"requires verl 0\.9\.x, but 0\.10\.0 is installed"):
        check_installed({"ray": "2.60.0", "verl": "0.10.0"}.__getitem__)


@pytest.mark.skipif(util.find_spec("ray") is not None, reason="Ray is installed here")
async def test_without_ray_the_launch_of_the_trainer_is_refused(tmp_path: Path) -> None:
    trainer = ChildEngine(
        EngineSpec("verl", tmp_path, str(DEMO_MODEL_DIR), "demo", train_only=True)
    )
    with pytest.raises(BackendRefused, match=r"make_environment\.sh FOLDER`$"):
        await trainer.launch()
    await trainer.close()
