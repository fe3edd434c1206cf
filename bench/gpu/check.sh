#!/usr/bin/env bash
# The connector on a GPU: one command, a few minutes, no network.
#
#     bench/gpu/check.sh          the workers against CUDA tensors, then the speed of copies
#     bench/gpu/check.sh cpu      the workers in host memory, where there is no GPU
#
# PYTHON: an interpreter that has torch, vLLM's Python and what prfaas needs; .venv's if there is one.
# OUT: where tables and JSON go; build/gpu.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=${1:-cuda}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
out=${OUT:-build/gpu}
mkdir -p "$out"
export PYTHONPATH="src:bench${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'LACKS'
import importlib.util
import sys

wanted = ("torch", "numpy", "vllm", "msgspec", "cryptography", "xxhash", "yaml")
lacks = [name for name in wanted if importlib.util.find_spec(name) is None]
if lacks:
    sys.exit(f"bench/gpu/check.sh: {sys.executable} lacks {', '.join(lacks)}; name another one by PYTHON=…")
LACKS

# 240 and 200 s: together under eight minutes.
timeout 240 "$python" bench/gpu/workers.py --device "$device" --json "$out/workers.json" | tee "$out/workers.txt"
if [ "$device" = cuda ]; then
	timeout 200 "$python" bench/gpu/pages.py --json "$out/pages.json" | tee "$out/pages.txt"
fi
