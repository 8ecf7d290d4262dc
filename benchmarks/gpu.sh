#!/usr/bin/env bash
# What a machine with a GPU has to show, without a network: what it offers, the tests that need it, the benchmarks.
#
#   benchmarks/gpu.sh [FOLDER]      results go to FOLDER (benchmarks/results); PYTHON is the interpreter, LIMIT the seconds in all (540)
#
# A part that fails does not stop the others; one for which less than half of its time is left is not begun, since most write
# nothing before all of their arms are compiled, and shorter ones after it are. Given again, the script does what is missing:
# outputs/bench-gpu remembers the parts that this code has done on this GPU. Exits with 1 if any failed or was left out.
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-$(command -v python3)} LIMIT=${LIMIT:-540} OUT=${1:-benchmarks/results}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
files() { find nmrun conf tests -type f ! -path '*__pycache__*' -exec sha256sum {} + | sort; }
code=$({ nvidia-smi --query-gpu=name --format=csv,noheader; files; } 2>/dev/null | sha256sum | cut -c1-16)
finished=outputs/bench-gpu/$code status=0
mkdir -p "$finished"

part() { # name, most seconds, command
  local name=$1 most=$2 left=$((LIMIT - SECONDS)) began=$SECONDS
  shift 2
  [ -e "$finished/$name" ] && echo "=== $name: done before" && return
  if [ "$left" -lt 10 ] || [ $((2 * left)) -lt "$most" ]; then
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
  local name=$1 most=$2 what=$3 folder measured before
  shift 3
  folder=$(mktemp -d)
  part "$name" "$most" "$PYTHON" -m nmrun bench "$what" --device cuda --out "$folder" "$@"
  # a try that was cut off does not replace a longer one
  measured=$(cat "$folder"/*_gpu.json 2>/dev/null | awk '/"n": / { sum += $2 } END { print sum + 0 }')
  before=$(cat "$finished/$name.measured" 2>/dev/null || echo 1)
  if [ "$measured" -ge "$before" ]; then
    mkdir -p "$OUT" && echo "$measured" >"$finished/$name.measured"
    mv "$folder"/*_gpu.md "$OUT/${name}_gpu.md" && mv "$folder"/*_gpu.json "$OUT/${name}_gpu.json"
  fi
  rm -rf "$folder"
}

# a part is one model, so that it ends within a call; the first ones say most
train() { # model, most seconds, options
  local model=$1 most=$2
  shift 2
  bench "train_$model" "$most" train --models "$model" "$@" --rounds 8 trainer.deterministic=false
}

infer() { # model, most seconds, sizes
  local model=$1 most=$2
  shift 2
  bench "infer_$model" "$most" infer --models "$model" --rounds 8 --tokens "$@"
}

part doctor 60 "$PYTHON" -m nmrun doctor
part tests_gpu 300 "$PYTHON" -m pytest -rs -m gpu tests/lab/bench/test_gpu.py
bench layer_wide 100 layer --shapes 4096x16384 --rounds 12
train gpt_4096 150
infer llama_7b_block_prompt 150 16x1024
infer llama_7b_block 100 1 32
infer bert_large 120 32x512
train gpt2_medium 300 --arms masked accelerated
infer gpt2_medium_prompt 120 16x1024
part tests_triton 240 "$PYTHON" -m pytest -rs -m gpu tests/kernels/test_triton.py
bench train_t_sr_ste 150 train --models gpt_4096 --recipe t_sr_ste --arms accelerated --rounds 8 trainer.deterministic=false
bench train_s_ste 150 train --models gpt_4096 --recipe s_ste --arms accelerated --rounds 8 trainer.deterministic=false trainer.mvue=2:4
infer vit_large 120 32
infer gpt2_xl_prompt 300 16x1024
infer gpt2_xl 200 1 32
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # the largest ones need all memory
bench train_gpt2_large 300 train --models gpt2_large --arms masked accelerated --rounds 8 trainer.deterministic=false trainer.batch_size=8
train gpt_1_3b 300 --arms accelerated
train gpt2 200
train vit_large 250 --arms masked accelerated
unset PYTORCH_CUDA_ALLOC_CONF
bench train_t_sr_ste_medium 300 train --models gpt2_medium --recipe t_sr_ste --arms accelerated --rounds 8 trainer.deterministic=false
infer gpt2_prompt 80 16x1024
infer gpt2 60 1 32
bench gemm 100 gemm --tokens 2048 8192 32768
bench gemm_fp8 40 gemm --fp8 --shapes 1024x4096 4096x16384 --tokens 8192 --rounds 10
bench masks 60 masks --arms nmrun reference topk nm_mask
bench update 60 update --weights 85
bench layer 120 layer --shapes 768x3072 3072x768 1600x6400 6400x1600
exit $status
