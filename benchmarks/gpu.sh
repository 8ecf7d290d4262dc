#!/usr/bin/env bash
# What a machine with a GPU has to show, without a network: what it offers, the tests that need it, the benchmarks.
#
#   benchmarks/gpu.sh [FOLDER]      results go to FOLDER (benchmarks/results); PYTHON is the interpreter, LIMIT the seconds in all (585)
#
# A part that fails does not stop the others; one for which no time is left is not begun. Given again, the script does what is
# missing: outputs/bench-gpu remembers the parts that this code has done on this GPU. Exits with 1 if any failed or was left out.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python} LIMIT=${LIMIT:-585} OUT=${1:-benchmarks/results}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
code=$({ nvidia-smi -L; find nmrun conf tests "$0" -type f ! -path '*__pycache__*' -exec sha256sum {} + | sort; } 2>/dev/null | sha256sum | cut -c1-16)
finished=outputs/bench-gpu/$code status=0
mkdir -p "$finished"

part() { # name, most seconds, command
  local name=$1 most=$2 left=$((LIMIT - SECONDS)) began=$SECONDS
  shift 2
  [ -e "$finished/$name" ] && echo "=== $name: done before" && return
  if [ "$left" -lt 10 ]; then
    echo "=== $name: no time left" && status=1 && return
  fi
  echo "=== $name"
  # what a benchmark has measured it writes when it is interrupted
  if timeout --signal=INT --kill-after=10 $((left < most ? left : most)) "$@"; then
    touch "$finished/$name"
  else
    echo "=== $name FAILED with $?" && status=1
  fi
  echo "=== $name took $((SECONDS - began)) s"
}

bench() { # name of the results, most seconds, what, options
  local name=$1 most=$2 what=$3 folder kind
  shift 3
  folder=$(mktemp -d)
  part "$name" "$most" "$PYTHON" -m nmrun bench "$what" --device cuda --out "$folder" "$@"
  for kind in md json; do
    mkdir -p "$OUT" && mv "$folder"/*_gpu.$kind "$OUT/${name}_gpu.$kind" 2>/dev/null
  done
  rm -rf "$folder"
}

part doctor 60 "$PYTHON" -m nmrun doctor
part tests 200 "$PYTHON" -m pytest -m gpu tests/lab/bench/test_gpu.py tests/kernels/test_triton.py
bench infer_prompt 200 infer --models llama_7b_block_prompt gpt2_xl_prompt gpt2_medium_prompt gpt2_prompt --tokens 2x1024 16x1024 --rounds 8
bench infer_encoder 100 infer --models bert_large --tokens 32x128 32x512 --rounds 8
bench infer_images 100 infer --models vit_large --tokens 1 32 --rounds 8
bench infer_token 150 infer --models llama_7b_block gpt2_xl gpt2_medium gpt2 --tokens 1 32 --rounds 8
bench train 300 train --models gpt_4096 gpt2_medium gpt2_large --rounds 8 trainer.deterministic=false
bench train_t_sr_ste 150 train --models gpt_4096 gpt2_medium --recipe t_sr_ste --arms accelerated --rounds 8 trainer.deterministic=false
bench train_s_ste 150 train --models gpt_4096 gpt2_medium --recipe s_ste --arms accelerated --rounds 8 trainer.deterministic=false
bench train_others 300 train --models gpt2 vit_large gpt_1_3b --rounds 8 trainer.deterministic=false
bench gemm 100 gemm --tokens 2048 8192 32768
bench gemm_fp8 40 gemm --fp8 --shapes 1024x4096 4096x16384 --tokens 8192 --rounds 10
bench masks 60 masks --arms nmrun reference topk nm_mask
bench update 60 update --weights 85
bench layer 120 layer --shapes 768x3072 3072x768 1600x6400 6400x1600 4096x16384
exit $status
