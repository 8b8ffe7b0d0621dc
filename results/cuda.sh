#!/usr/bin/env bash
# The measurements of a CUDA device, in at most six minutes: `bash results/cuda.sh`, or with
# PYTHON=/path/to/python. Each part has a time limit and ends like Ctrl-C at that limit: what was
# measured until then is written.
set -euo pipefail
cd "$(dirname "$0")/.."

bench() { # seconds, name of the results, flags
    local seconds=$1 name=results/cuda_$2
    shift 2
    local status=0
    timeout --signal=INT --kill-after=10 "$seconds" "${PYTHON:-python}" bench.py --device cuda \
        --json "$name.json" --markdown "$name.md" "$@" || status=$?
    case $status in
        0) ;;
        124 | 130 | 137) echo "stopped after $seconds s: $name holds the rows until then" >&2 ;;
        *) return "$status" ;;
    esac
}

qwen3=(--model qwen3-0.6b-base --random-weights --dtype bfloat16)

# The combinations that matter most come first, and fill the compiler's cache for the others.
bench 75 graph "${qwen3[@]}" --cache preallocated --compile on --cuda-graph on --pipeline off event \
    --trace results/cuda_trace.json
bench 180 default "${qwen3[@]}" --new-tokens 64 --runs 2 --plot results/cuda_default.png
bench 95 token_generation --experiment token-generation --random-weights --batch-size 32 \
    --new-tokens 50 --runs 3
