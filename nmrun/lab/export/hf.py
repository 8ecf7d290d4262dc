"""A Hugging Face folder (config, weights, tokenizer) for GPT and for models that were loaded from
Hugging Face."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError, needs
from nmrun.lab.export.finished_run import (
    FinishedRun,
    SparseLayer,
    refuse_pruned_activations,
    write_about,
)
from nmrun.lab.keys.models import GPT
from nmrun.lab.keys.options import CLASSES, kind
from nmrun.lab.models import hugging_face
from nmrun.lab.models.hugging_face import EncoderClassifier
from nmrun.lab.models.texts import GPTNetwork
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
    ours = name in OURS and not options.get("_target_")
    if not ours and name not in PRETRAINED:
        raise ConfigError(
            f"model={name} is no network of Hugging Face; --format hf takes {', '.join((*PRETRAINED, *OURS))}"
        )
    refuse_pruned_activations(run)
    if ours:
        config = _config(run)
    else:
        config = fetch("AutoConfig", "model.pretrained", options["pretrained"])
    makers = {"hf_causal": _causal, "hf_encoder": _encoder}
    network, names, notes = makers.get(name, _gpt2)(run, config, folder)
    with quiet():
        network.save_pretrained(folder)
    if name in ("hf_gpt2", "hf_causal"):
        _generation(options["pretrained"], folder)
    state, layers = network.state_dict(), []
    for layer in run.layers:
        dim = (
            0
            if (ours or name == "hf_gpt2") and layer.name.endswith(hugging_face.TRANSPOSED)
            else layer.dim
        )
        layers.append(SparseLayer(names.get(layer.name, layer.name), layer.pattern, dim))
        if layers[-1].name in state:
            check_nm(state[layers[-1].name], layer.pattern, dim, pad=True)
    write_about(run.about([layer.plain for layer in layers]), folder)
    notes += _tokenizer(run, folder)
    return [
        f"model.safetensors: {run.holds} of {type(network).__name__}",
        *notes,
    ]


def _config(run: FinishedRun) -> Any:
    with needs("--format hf", "transformers"):
        import transformers
    options = run.result["config"]["model"]
    vocabulary, width = run.state["wte.weight"].shape
    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "n_positions": len(run.state["wpe.weight"]),
        "n_embd": width,
        "n_layer": options["layers"],
        "n_head": options["heads"],
        "activation_function": ACTIVATIONS[options.get("activation", "gelu")],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options["dropout"]),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),  # the data do not have such tokens
    }
    return transformers.GPT2Config(**values)


def _gpt2(run: FinishedRun, config: Any, folder: Path) -> tuple[Any, dict[str, str], list[str]]:
    """Hugging Face's network with the run's weights, stored (inputs, outputs) where theirs are."""
    import transformers

    theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {
        name: name if name.startswith("lm_head") else f"transformer.{name}" for name in run.state
    }
    state = {
        names[n]: t.T.contiguous() if n.endswith(hugging_face.TRANSPOSED) else t
        for n, t in run.state.items()
    }
    # their layers always have biases, which are 0 for a network without
    zeros = {n: torch.zeros_like(t) for n, t in theirs.state_dict().items() if n.endswith("bias")}
    without = "ln_f.bias" not in run.state
    _fill(theirs, {**zeros, **state} if without else state)
    relu2 = config.activation_function == "relu2"
    ours = GPTNetwork(
        config.vocab_size,
        config.n_positions,
        config.n_layer,
        config.n_head,
        config.n_embd,
        bias=not without,
        activation="relu2" if relu2 else "gelu",
    ).eval()
    ours.load_state_dict(run.state)
    tokens = torch.arange(4 * config.n_positions).view(4, -1) % config.vocab_size
    with torch.no_grad():
        expected, logits = ours(tokens), theirs(tokens).logits
    if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise RunError(
            "Hugging Face's GPT-2 does not compute with these weights what the run's does"
        )
    return theirs, names, []


def _causal(run: FinishedRun, config: Any, folder: Path) -> tuple[Any, dict[str, str], list[str]]:
    """Hugging Face's network with the run's weights, under their own names."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype="float32")
    names = {name: name.removeprefix("network.") for name in run.state}
    _fill(theirs, {names[name]: tensor for name, tensor in run.state.items()})
    return theirs, names, []


def _encoder(run: FinishedRun, config: Any, folder: Path) -> tuple[Any, dict[str, str], list[str]]:
    """Hugging Face's classifier with the run's weights if it is the same function, else the encoder
    alone and the head beside it."""
    import transformers

    options, classes = run.result["config"]["model"], len(run.state["head.weight"])
    ours = EncoderClassifier(
        transformers.AutoModel.from_config(config, dtype="float32"),
        classes,
        options["pooling"],
        0.0,
    ).eval()
    _fill(ours, run.state)
    config.num_labels = classes
    classifier = _classifier(ours, config)
    if classifier is not None:
        return *classifier, []
    head = {name: run.state[f"head.{name}"].contiguous() for name in ("weight", "bias")}
    (folder / "head.safetensors").write_bytes(save(head))
    note = f"  the encoder, for AutoModel; no classifier of transformers has this head ({options['pooling']}): head.safetensors"
    return ours.encoder, {name: name.removeprefix("encoder.") for name in run.state}, [note]


def _classifier(ours: EncoderClassifier, config: Any) -> tuple[Any, dict[str, str]] | None:
    import transformers

    try:
        theirs = transformers.AutoModelForSequenceClassification.from_config(
            config, dtype="float32"
        ).eval()
    except ValueError:  # there is none for this architecture
        return None
    state, keys = ours.state_dict(), theirs.state_dict().keys()
    names = {name: f"{theirs.base_model_prefix}.{name.removeprefix('encoder.')}" for name in state}
    for part in ("weight", "bias"):
        names[f"head.{part}"] = next(
            (
                f"classifier.{to}{part}"
                for to in ("", "out_proj.")
                if f"classifier.{to}{part}" in keys
            ),
            "",
        )
        if f"classifier.dense.{part}" in keys:  # RoBERTa's classifier has the pooler in it
            names[f"encoder.pooler.dense.{part}"] = f"classifier.dense.{part}"
    if set(names.values()) != keys:
        return None
    try:
        _fill(theirs, {names[name]: tensor for name, tensor in state.items()})
    except RunError:
        return None
    tokens = torch.arange(48).view(4, 12) % config.vocab_size
    mask = torch.arange(12) < torch.tensor([[12], [7], [9], [3]])
    segments = torch.zeros_like(tokens)
    inputs = {"token_type_ids": segments} if ours.has_segments else {}
    with torch.no_grad():
        same = torch.equal(
            ours(tokens, mask, segments),
            theirs(tokens, attention_mask=mask.long(), **inputs).logits,
        )
    return (theirs, names) if same else None


def _fill(model: nn.Module, state: dict[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunError(f"the weights do not fit the config of model.pretrained: {error}") from None


def _generation(pretrained: str, folder: Path) -> None:
    """Copy the pretrained network's settings for generation, such as the tokens that end a text, if
    it has any."""
    from transformers.utils.hub import cached_file

    source = cached_file(
        str(Path(pretrained).expanduser()),
        "generation_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if source is not None:
        shutil.copyfile(source, folder / "generation_config.json")


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
