#!/usr/bin/env bash
# Make an environment with PyPI's `speculators` at $1: two minutes the first time, nothing after that.
# Its import name is ours, so that the two can never stand in one environment.
set -euo pipefail
dir=${1:?usage: make_env.sh DIRECTORY}
export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -f "$dir/complete" ] && exit 0

"${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/pip" install -q "torch==2.13.0" numpy
# Without its dependencies: it asks for torchvision and torchaudio, whose builds want CUDA; the others follow by hand.
"$dir/bin/pip" install -q --no-deps "speculators==0.9.0" "hs-connectors==0.9.0"
"$dir/bin/pip" install -q "transformers==5.19.0" "datasets==5.1.0" "accelerate==1.15.0" safetensors "pydantic>=2" \
  pydantic-settings typer click rich "loguru==0.7.3" httpx "openai>=2" aiohttp psutil protobuf tqdm scipy
# From a folder without a package of the same name.
(cd "$dir" && bin/python -c 'from speculators.model import SpeculatorModel; assert "dspark" in SpeculatorModel.registry' 2>/dev/null) \
  || { echo "PyPI's speculators does not import in $dir" >&2; exit 1; }
touch "$dir/complete"
