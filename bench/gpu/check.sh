#!/usr/bin/env bash
# The connector on a GPU: one command, at most eight minutes, no network.
#
#     bench/gpu/check.sh          workers against CUDA tensors, the speed of copies, whole engines on the GPU
#     bench/gpu/check.sh cpu      workers and engines in host memory, where there is no GPU
#
# PYTHON: an interpreter that has torch and what prfaas needs; .venv's if there is one.
# OUT: where tables and JSON go; build/gpu.
# PACK: vLLM's Python and small wheels, as pack.py makes them, for an interpreter that has no vLLM; build/gpu/pack.
# ONLY: names of steps, in place of all.
set -uo pipefail
cd "$(dirname "$0")/../.."
device=${1:-cuda}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
out=${OUT:-build/gpu}
pack=${PACK:-build/gpu/pack}
mkdir -p "$out"
# Engines start in other folders, so paths are whole ones.
export PYTHONPATH="$PWD/src:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"

has() { "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }

if ! has vllm && [ -d "$pack/vllm" ]; then
	export PYTHONPATH="$PYTHONPATH:$(cd "$pack" && pwd)"
	made_for=$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["python"])' "$pack/pack.json")
	ours=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	if [ "$made_for" != "$ours" ]; then
		echo "bench/gpu/check.sh: $pack is for Python $made_for, $python is $ours; make one by pack.py --python $ours" >&2
		exit 2
	fi
fi
lacks=""
for name in torch numpy vllm msgspec cryptography xxhash yaml aiohttp orjson transformers; do
	has "$name" || lacks="$lacks $name"
done
if [ -n "$lacks" ]; then
	echo "bench/gpu/check.sh: $python lacks$lacks; name another one by PYTHON=…, or unpack what pack.py makes to $pack" >&2
	exit 2
fi

failed=0
# In the foreground, so that what ends this script ends its step, too.
# NAME SECONDS COMMAND…: its table to the terminal and a file. One that fails says why in a line, and the next one runs.
step() {
	local name=$1 seconds=$2 began=$SECONDS status
	shift 2
	if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]]; then
		return
	fi
	timeout --foreground -k 5 "$seconds" "$python" "$@" 2>"$out/$name.err" | tee "$out/$name.txt"
	status=$?
	if [ "$status" = 0 ]; then
		return
	fi
	failed=1
	if [ "$status" = 124 ] || [ "$status" = 137 ]; then
		echo "$name: not done within $seconds s"
	else
		echo "$name: failed after $((SECONDS - began)) s: $(grep -v '^[[:space:]]*$' "$out/$name.err" | tail -n 1)"
	fi
}

engines() {
	rm -rf "${out:?}/$1"
	step "$1" "$2" bench/gpu/engines.py "${@:3}" --device "$device" --out "$out/$1"
}

# Together 450 s on a GPU, and 5 s more for each that has to be killed.
if [ "$device" = cuda ]; then
	step workers 50 bench/gpu/workers.py --device cuda --json "$out/workers.json"
	step pages 60 bench/gpu/pages.py --json "$out/pages.json"
	engines kimi-linear 85 kimi-linear
	engines qwen3-next-mtp 85 qwen3-next-mtp
	engines kimi-linear-piecewise 85 kimi-linear --graphs piecewise
	engines qwen3-next-mtp-piecewise 85 qwen3-next-mtp --graphs piecewise
else
	step workers 240 bench/gpu/workers.py --device cpu --tokens 1024 --json "$out/workers.json"
	engines kimi-linear 240 kimi-linear
	engines qwen3-next-mtp 240 qwen3-next-mtp
fi
exit "$failed"
