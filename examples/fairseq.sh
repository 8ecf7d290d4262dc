#!/bin/sh
# Stock fairseq-train and fairseq-generate on sentences and the same backwards: the folder given as
# --user-dir and the options --nm-... make the training sparse.
#
#   pip install '.[translation]'
#   examples/fairseq.sh [FOLDER]
set -e
work=${1:-$(mktemp -d)}
mkdir -p "$work/text"
export TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1  # fairseq's checkpoints hold more than tensors

for split in train:2000:1 valid:50:2 test:50:3; do
  name=${split%%:*} rest=${split#*:}
  awk -v count="${rest%:*}" -v seed="${rest#*:}" -v to="$work/text/$name" 'BEGIN {
    srand(seed)
    for (i = 0; i < count; i++) {
      there = back = ""
      for (j = 0; j < 3 + int(4 * rand()); j++) {
        word = "w" int(20 * rand())
        there = there word " "
        back = word " " back
      }
      print there > (to ".src")
      print back > (to ".tgt")
    }
  }'
done

fairseq-preprocess --source-lang src --target-lang tgt --trainpref "$work/text/train" \
  --validpref "$work/text/valid" --testpref "$work/text/test" --destdir "$work/data" > "$work/log"

fairseq-train "$work/data" --cpu --save-dir "$work/saved" --arch transformer_iwslt_de_en \
  --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 \
  --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --lr 0.005 --max-tokens 512 \
  --update-freq 2 --max-update 100 --no-epoch-checkpoints --adam-betas '(0.9, 0.98)' \
  --optimizer nm_adam --user-dir "$(python -m nmrun.integrations.fairseq)" \
  --nm-recipe step --nm-pattern 2:4 --nm-options "switch=0.3" >> "$work/log" 2>&1

fairseq-generate "$work/data" --cpu --path "$work/saved/checkpoint_last.pt" --beam 2 | tail -1
