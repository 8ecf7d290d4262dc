"""A Hugging Face folder (config, weights, tokenizer) for GPT and for models that were loaded from
Hugging Face."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError, needs
from nmrun.lab.export.finished_run import FinishedRun, SparseLayer
from nmrun.lab.keys.models import GPT
from nmrun.lab.keys.options import CLASSES, kind
from nmrun.lab.models.hugging_face import TRANSPOSED, EncoderClassifier
from nmrun.lab.runs.run_folder import expanded
from nmrun.lab.tasks.hugging_face import fetch, quiet
from nmrun.lab.tasks.text.files import LEVELS
from nmrun.sparsity.check import check_nm

PRETRAINED = ("hf_encoder", "hf_gpt2", "hf_causal")
ACTIVATIONS = {"gelu": "gelu_new", "relu2": "relu2"}  # their names by ours
OURS = tuple(n for n in CLASSES["model"] if kind("model", n).builder == GPT.builder)


def write(run: FinishedRun, folder: Path) -> list[str]:
    """Write what ``save_pretrained`` writes; ``sparsity.json`` has the names and dimensions of
    these weights.

    ``AutoModelForCausalLM`` loads a language model. ``AutoModelForSequenceClassification`` loads an
    encoder where its own classifier computes what this one does (the logits are compared, bit for
    bit); else the folder holds the encoder for ``AutoModel``, and ``head.safetensors`` the head.
    ConfigError for other models, and if the config or tokenizer cannot be had again.
    """
    options = run.result["config"]["model"]
    name = options["name"]
    if options.get("_target_") or name not in (*OURS, *PRETRAINED):
        takes = ", ".join((*PRETRAINED, *OURS))
        raise ConfigError(f"model={name} is no network of Hugging Face; --format hf takes {takes}")
    with needs("--format hf", "transformers"):
        import transformers
    if name in OURS:
        config = _config(run)
    else:
        config = fetch("AutoConfig", "model.pretrained", options["pretrained"])
    makers = {"hf_causal": _causal, "hf_encoder": _encoder}
    network, names = makers.get(name, _gpt2)(run, config)
    notes, state = _tokenizer(run, folder), network.state_dict()
    if name in ("hf_gpt2", "hf_causal"):  # such as the tokens that end a text, if it says them
        with contextlib.suppress(OSError, ValueError), quiet():  # none, or one that cannot be
            pretrained = str(expanded(options["pretrained"]))
            generation = transformers.GenerationConfig.from_pretrained(pretrained)
            network.generation_config = generation
    if name == "hf_encoder" and "head.weight" not in names:
        head = {part: run.state[f"head.{part}"].contiguous() for part in ("weight", "bias")}
        (folder / "head.safetensors").write_bytes(save(head))
        notes.append(
            "  the encoder, for AutoModel; no classifier of transformers has this head "
            f"({options['pooling']}): head.safetensors"
        )
    with quiet():
        network.save_pretrained(folder)
    turned, layers = TRANSPOSED if name in (*OURS, "hf_gpt2") else (), []
    for layer in run.layers:
        dim = 0 if layer.name.endswith(turned) else layer.dim
        layers.append(SparseLayer(names.get(layer.name, layer.name), layer.pattern, dim))
        if layers[-1].name in state:
            check_nm(state[layers[-1].name], layer.pattern, dim, pad=True)
    run.describe(folder, [layer.plain for layer in layers])
    return [f"model.safetensors: {run.holds} of {type(network).__name__}", *notes]


def _config(run: FinishedRun) -> Any:
    import transformers

    options = run.result["config"]["model"]
    vocabulary, width = run.state["wte.weight"].shape
    dropout: Any = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options["dropout"])
    return transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=len(run.state["wpe.weight"]),
        n_embd=width,
        n_layer=options["layers"],
        n_head=options["heads"],
        activation_function=ACTIVATIONS[options.get("activation", "gelu")],
        bos_token_id=None,  # the data do not have such tokens
        eos_token_id=None,
        **dropout,
    )


Made = tuple[Any, dict[str, str]]  # a network of transformers, and its names by ours


def _gpt2(run: FinishedRun, config: Any) -> Made:
    """Hugging Face's network with the run's weights, stored (inputs, outputs) where theirs are."""
    import transformers

    theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {n: n if n.startswith("lm_head") else f"transformer.{n}" for n in run.state}
    state = {
        names[n]: t.T.contiguous() if n.endswith(TRANSPOSED) else t for n, t in run.state.items()
    }
    if "ln_f.bias" not in run.state:  # their layers always have biases
        for name, tensor in theirs.state_dict().items():
            if name.endswith("bias"):
                state[name] = torch.zeros_like(tensor)
    _fill(theirs, state)
    return theirs, names


def _causal(run: FinishedRun, config: Any) -> Made:
    """Hugging Face's network with the run's weights, under their own names."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
    names = {name: name.removeprefix("network.") for name in run.state}
    _fill(theirs, {names[name]: tensor for name, tensor in run.state.items()})
    return theirs, names


def _encoder(run: FinishedRun, config: Any) -> Made:
    """Hugging Face's classifier with the run's weights if it is the same function, else the encoder
    alone."""
    import transformers

    options, classes = run.result["config"]["model"], len(run.state["head.weight"])
    encoder = transformers.AutoModel.from_config(config, dtype="float32")
    ours = EncoderClassifier(encoder, classes, options["pooling"], 0.0).eval()
    _fill(ours, run.state)
    config.num_labels = classes
    with contextlib.suppress(ValueError, RunError):  # none of this architecture, or of another head
        theirs = transformers.AutoModelForSequenceClassification.from_config(
            config, dtype="float32"
        ).eval()
        names = _classifier_names(run.state, theirs)
        _fill(theirs, {names[name]: tensor for name, tensor in run.state.items()})
        tokens = torch.arange(48).view(4, 12) % config.vocab_size
        mask = torch.arange(12) < torch.tensor([[12], [7], [9], [3]])
        segments = torch.zeros_like(tokens)
        inputs = {"token_type_ids": segments} if ours.has_segments else {}
        with torch.no_grad():
            logits = theirs(tokens, attention_mask=mask.long(), **inputs).logits
            if torch.equal(ours(tokens, mask, segments), logits):
                return theirs, names
    return encoder, {n: n.removeprefix("encoder.") for n in run.state if n[:5] != "head."}


def _classifier_names(state: dict[str, Tensor], theirs: Any) -> dict[str, str]:
    """The names of a classifier of transformers by those of an :class:`EncoderClassifier`."""
    keys = theirs.state_dict().keys()
    names = {name: f"{theirs.base_model_prefix}.{name.removeprefix('encoder.')}" for name in state}
    for part in ("weight", "bias"):
        # RoBERTa's classifier has the pooler in it
        has_pooler = f"classifier.dense.{part}" in keys
        names[f"head.{part}"] = f"classifier.{'out_proj.' if has_pooler else ''}{part}"
        if has_pooler:
            names[f"encoder.pooler.dense.{part}"] = f"classifier.dense.{part}"
    return names


def _fill(model: nn.Module, state: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"the weights do not fit the config of model.pretrained: {error}") from None


def _tokenizer(run: FinishedRun, folder: Path) -> list[str]:
    """Save the tokenizer of the data; returns a note if it is not one of Hugging Face's."""
    source = run.result["config"]["dataset"].get("tokenizer")
    if source is None or source in (*LEVELS, "words"):
        which = "" if source is None else f" ({source})"
        return [f"  no tokenizer is saved: the data set makes its own tokens{which}"]
    if Path(source).is_file():
        import transformers

        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(source))
    else:
        tokenizer = fetch("AutoTokenizer", "dataset.tokenizer", source)
    tokenizer.save_pretrained(folder)
    return []
