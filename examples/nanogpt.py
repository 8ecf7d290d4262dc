"""A language model after nanoGPT's train.py and sample.py: accumulation, clipping, tied weights, two
parameter groups, warm-up and cosine, a checkpoint at each evaluation, compiling: three lines make
it sparse.

    python -m examples.nanogpt out=FOLDER
    python -m examples.nanogpt out=FOLDER init_from=resume max_iters=200
    python -m examples.nanogpt out=FOLDER init_from=sample
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import nmrun

SETTINGS = {
    "out": "", "init_from": "scratch", "recipe": "sr_ste", "pattern": "2:4", "compile": False,
    "max_iters": 100, "eval_interval": 25, "batch_size": 12, "accumulation": 3, "block_size": 64,
    "n_layer": 2, "n_head": 2, "n_embd": 64, "learning_rate": 3e-3, "min_lr": 3e-4,
    "warmup_iters": 10, "lr_decay_iters": 100, "weight_decay": 0.1, "grad_clip": 1.0, "seed": 0,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, block_size: int, n_layer: int, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            if p.ndim > 1:
                residual = name.endswith(("c_proj.weight", "mlp.2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def rate(step: int, cfg: Any) -> float:
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    done = min((step - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters), 1.0)
    return cfg.min_lr + (cfg.learning_rate - cfg.min_lr) * (1 + math.cos(math.pi * done)) / 2


def batch(data: Tensor, cfg: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that depend on the number of the batch alone, so that a resume draws the same."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - cfg.block_size, (cfg.batch_size, 1), generator=generator)
    rows = data[starts + torch.arange(cfg.block_size + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def sample(model: GPT, start: str, length: int) -> str:
    tokens = torch.tensor([[ord(letter) for letter in start]])
    for _ in range(length):
        logits = model(tokens[:, -model.block_size :])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return "".join(map(chr, tokens[0].tolist()))


def main(words: list[str]) -> float:
    given = dict(word.split("=", 1) for word in words)
    if unknown := given.keys() - SETTINGS:
        raise SystemExit(
            f"{min(unknown)}: there is no such setting; there are {', '.join(SETTINGS)}"
        )
    read = {k: type(v)(int(given[k]) if isinstance(v, bool) else given[k]) if k in given else v
            for k, v in SETTINGS.items()}  # fmt: skip
    cfg = argparse.Namespace(**read)
    torch.manual_seed(cfg.seed)
    text = Path(argparse.__file__).read_text(encoding="ascii")
    data = torch.tensor([ord(letter) for letter in text])
    train, val = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    folder = Path(cfg.out or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "ckpt.pt"
    shape = {k: getattr(cfg, k) for k in ("block_size", "n_layer", "n_head", "n_embd")}
    saved = None if cfg.init_from == "scratch" else torch.load(file, weights_only=True)

    model = GPT(128, **(saved["model_args"] if saved else shape))
    if saved:
        model.load_state_dict(saved["model"])
    if cfg.init_from == "sample":
        print(sample(model, "def ", 60))
        return math.nan
    groups = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=cfg.learning_rate, betas=(0.9, 0.99), weight_decay=cfg.weight_decay, fused=True,
    )  # fmt: skip
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    net = torch.compile(model) if cfg.compile else model
    handle = nmrun.sparsify(model, optimizer, cfg.recipe, cfg.pattern, cfg.max_iters)

    best = saved["best_val_loss"] if saved else math.inf
    for step in range(saved["iter_num"] if saved else 0, cfg.max_iters + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, cfg)
        if step % cfg.eval_interval == 0:
            with torch.no_grad():
                losses = [loss_of(net, *batch(val, cfg, seed)).item() for seed in range(4)]
            best = min(best, sum(losses) / 4)
            print(f"step {step}: val loss {sum(losses) / 4:.4f}")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"model_args": shape, "iter_num": step, "best_val_loss": best}
            torch.save(state, file)
        if step == cfg.max_iters:
            break
        for micro in range(cfg.accumulation):
            x, y = batch(train, cfg, 1000 + cfg.accumulation * step + micro)
            (loss_of(net, x, y) / cfg.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    handle.finalize()
    return float(best)


if __name__ == "__main__":
    main(sys.argv[1:])
