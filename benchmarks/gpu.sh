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

bench() { # name of the results, most seconds, command that writes into a folder
  local name=$1 most=$2 folder measured before
  shift 2
  folder=$(mktemp -d)
  part "$name" "$most" "$PYTHON" "$@" --out "$folder"
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
train() { # name, most seconds, model, options and overrides
  local name=$1 most=$2 model=$3
  shift 3
  bench "train_$name" "$most" benchmarks/training_products.py --model "$model" --steps 10 --rounds 8 "$@" \
    trainer.compile=true trainer.deterministic=false
}

infer() { # model, most seconds, sizes
  local model=$1 most=$2
  shift 2
  bench "infer_$model" "$most" -m nmrun bench infer --device cuda --models "$model" --sparsity 2:4 --rounds 8 \
    --arms torch packed compiled packed_compiled --tokens "$@"
}

language() { # model, most seconds, sizes, of prompts with --prompt behind them
  local model=$1 most=$2 name=infer_$1
  shift 2
  [[ " $* " == *" --prompt "* ]] && name+=_prompt
  bench "$name" "$most" benchmarks/language_inference.py --device cuda --models "$model" --rounds 8 --tokens "$@"
}

products=benchmarks/gpu_products.py
part doctor 60 "$PYTHON" -m nmrun doctor
part tests_gpu 300 "$PYTHON" -m pytest -rs -m gpu tests/lab/bench/test_gpu.py
bench layer_wide 100 $products --layer --shapes 4096x16384
train gpt_4096 150 gpt_4096
language llama_7b_block 150 16x1024 --prompt
language llama_7b_block 100 1 32
infer bert_large 120 32x512
train gpt2_medium 300 gpt2 model=gpt2_medium
language gpt2_medium 120 16x1024 --prompt
part tests_triton 240 "$PYTHON" -m pytest -rs -m gpu tests/kernels/test_triton.py
train t_sr_ste 150 gpt_4096 --recipe t_sr_ste
train s_ste 150 gpt_4096 --recipe s_ste trainer.mvue=2:4
infer vit_large 120 32
language gpt2_xl 300 16x1024 --prompt
language gpt2_xl 200 1 32
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # the largest ones need all memory
train gpt2_large 300 gpt2 model=gpt2_large trainer.batch_size=8
train gpt2 200 gpt2
train vit_large 250 vit_large
unset PYTORCH_CUDA_ALLOC_CONF
bench recipes 300 -m nmrun bench train --models gpt2 --rounds 8 trainer.precision=bf16
bench gemm 100 $products --shapes 768x3072 3072x768 2048x8192 4096x16384 16384x4096 --tokens 2048 8192 32768
bench masks 60 benchmarks/masks.py --device cuda
bench updates 60 benchmarks/updates.py --device cuda --weights 85
bench layer 120 $products --layer --shapes 768x3072 3072x768 1600x6400 6400x1600
exit $status
