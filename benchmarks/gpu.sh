#!/usr/bin/env bash
# What a machine with a GPU has to show, in ten minutes and without a network: what it offers, the tests that need it, the benchmarks.
#
#   benchmarks/gpu.sh [FOLDER]      results go to FOLDER (benchmarks/results); PYTHON is the interpreter, LIMIT the seconds in all (585)
#
# A part that fails does not stop the others; one for which no time is left is not begun. Exits with 1 if any failed or was left out.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python} LIMIT=${LIMIT:-585} OUT=${1:-benchmarks/results}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
status=0

part() { # name, most seconds, command
  local name=$1 most=$2 left=$((LIMIT - SECONDS)) began=$SECONDS
  shift 2
  if [ "$left" -lt 10 ]; then
    echo "=== $name: no time left" && status=1 && return
  fi
  echo "=== $name"
  timeout --kill-after=10 $((left < most ? left : most)) "$@" || { echo "=== $name FAILED with $?" && status=1; }
  echo "=== $name took $((SECONDS - began)) s"
}
bench() { part "$1" "$2" "$PYTHON" -m nmrun bench "$1" --device cuda --out "$OUT" "${@:3}"; }

part doctor 60 "$PYTHON" -m nmrun doctor
part tests 200 "$PYTHON" -m pytest -m gpu tests/lab/bench/test_gpu.py tests/kernels/test_triton.py
bench gemm 100 --tokens 2048 8192 32768
bench gemm 40 --fp8 --shapes 1024x4096 4096x16384 --tokens 8192 --rounds 10
bench masks 60 --arms nmrun reference topk nm_mask
bench update 60 --weights 85
bench layer 120 --shapes 768x3072 3072x768 1600x6400 6400x1600 4096x16384
bench infer 60 --models gpt2 --batches 1 8
bench train 300 --models gpt2 gpt_4096 --rounds 8
exit $status
