"""Writes the file that `shardproof check` reads, as a start, for a module or a configuration of Hugging Face."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from shardproof.engine.import_by_name import LoadError, load, one_line
from shardproof.harness.cases.units import is_called
from shardproof.harness.errors import ModelError
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask

__all__ = ["Start", "written_start"]

_LIMIT_S, _LONGEST = 300.0, 2**20
_HINT = "see `shardproof check --help` for what to write"
_ROWS, _LENGTH, _SIDE = 4, 16, 32  # of a batch, of a sequence, and of an image
# Fields of a configuration, and values that make a small model; those that it does not have are left out.
_SMALL: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "embedding_size": 64,
    "intermediate_size": 128,
    "d_ff": 128,
    "ffn_dim": 128,
    "hidden_dim": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "word_embed_proj_dim": 64,
    "image_size": _SIDE,
    "patch_size": 8,
    "num_labels": 10,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "tokens",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "tokens",
    "MODEL_FOR_MASKED_LM_MAPPING": "tokens",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING": "images",
}
_FILE = '''"""Written by `shardproof init`. Make it your model: its sizes, its data and its loss."""

import torch
{imports}

class {name}:
    units = {units!r}  # the submodules that communicate together, by patterns

    def build(self):
        return {build}

    def batch(self, generator):
{batch}

    def loss(self, output, batch):
        {loss}
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The text of a file, and the class in it."""

    name: str
    text: str


def written_start(spec: str, *, is_config: bool) -> Start:
    """Return the file for a module class, as path/to/file.py:Net, or for the name of a configuration of transformers.

    Raises UsageError for one that is not understood. The user's code runs in a process of its own.
    """
    try:
        answer = json.loads(ask(_LIMIT_S, _LONGEST, _answer, spec, is_config))
    except (NoAnswerError, ValueError) as error:
        answer = {"problem": f"a process that {error}"}
    if "problem" in answer:
        expected = "a configuration of transformers" if is_config else "a class of torch.nn.Module"
        raise ModelError(spec, expected=expected, got=answer["problem"], hint=_HINT)
    return Start(name=answer["name"], text=answer["text"])


def _answer(spec: str, is_config: bool) -> bytes:
    try:
        start = _of_config(spec) if is_config else _of_module(spec)
        return json.dumps({"name": start.name, "text": start.text}).encode()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        kind = "" if isinstance(error, ValueError | LoadError) else f"{type(error).__name__}: "
        return json.dumps({"problem": f"{kind}{one_line(error)}"}).encode()


# Any, from here on: the user's classes, and those of a library that need not be installed.
def _of_module(spec: str) -> Start:
    found: Any = load(spec)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"{spec.rpartition(':')[2]} is no class of torch.nn.Module")
    model: nn.Module = found()
    arguments = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    drawn = _drawn_for(model)
    entries = ", ".join(f'"{name}": {drawn}' for name in arguments)
    module, _, name = spec.rpartition(":")
    loading = ""
    if module.endswith(".py"):
        file = Path(module)
        loading, module = f"import sys\n\nsys.path.append({str(file.parent)!r})\n", file.stem
    loading += f"from {module} import {name}\n"
    return Start(
        name=f"{name}Model",
        text=_FILE.format(
            imports=loading,
            name=f"{name}Model",
            units=_units(model),
            build=f"{name}()",
            batch=f"        return {{{entries}}}",
            loss="return output.square().mean()  # your loss: the mean over the batch",
        ),
    )


def _drawn_for(model: nn.Module) -> str:
    """Return an expression that draws the input of a model's first layer."""
    for layer in model.modules():
        match layer:
            case nn.Embedding():
                return f"torch.randint({layer.num_embeddings}, ({_ROWS}, {_LENGTH}), generator=generator)"
            case nn.Linear():
                return f"torch.randn({_ROWS}, {layer.in_features}, generator=generator)"
            case nn.Conv1d():
                return f"torch.randn({_ROWS}, {layer.in_channels}, {_SIDE}, generator=generator)"
            case nn.Conv2d():
                return f"torch.randn({_ROWS}, {layer.in_channels}, {_SIDE}, {_SIDE}, generator=generator)"
            case nn.RNNBase():
                return f"torch.randn({_LENGTH}, {_ROWS}, {layer.input_size}, generator=generator)"
    raise ValueError("no layer of it tells what data it takes")


def _of_config(name: str) -> Start:
    transformers = import_module("transformers")
    kind = getattr(transformers, name, None) or getattr(transformers, f"{name}Config", None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig)):
        raise ValueError(f"transformers {transformers.__version__} has no configuration {name!r}")
    made, data = _model_of(kind)
    usual = kind()
    sizes = {field: value for field, value in _SMALL.items() if isinstance(getattr(usual, field, None), int)}
    if data == "tokens":
        sizes.pop("num_labels", None)
    if getattr(usual, "is_encoder_decoder", False):
        sizes["decoder_start_token_id"] = 0
    given = "".join(f"                {field}={value},\n" for field, value in sizes.items())
    own = kind.__name__.removesuffix("Config")
    return Start(
        name=own,
        text=_FILE.format(
            imports=f"from transformers import {kind.__name__}, {made.__name__}\n",
            name=own,
            units=_units(made(kind(**sizes))),
            build=f"{made.__name__}(\n            {kind.__name__}(\n{given}            )\n        )",
            batch=_tokens(sizes) if data == "tokens" else _images(usual, sizes),
            loss="return output.loss",
        ),
    )


def _model_of(kind: Any) -> tuple[Any, str]:
    """Return the class of the first model with a loss that transformers has for a configuration, and its data."""
    auto = import_module("transformers.models.auto.modeling_auto")
    for mapping, data in _TASKS.items():
        table = getattr(auto, mapping)
        if kind in table:
            made = table[kind]
            return (made[0] if isinstance(made, tuple) else made), data
    raise ValueError(f"transformers has no model for {kind.__name__} whose loss is known here")


def _tokens(sizes: Mapping[str, Any]) -> str:
    most, shape = sizes.get("vocab_size", 256), (_ROWS, _LENGTH)
    return (
        f"        tokens = torch.randint(3, {most}, {shape}, generator=generator)\n"
        '        return {"input_ids": tokens, "labels": tokens}'
    )


def _images(usual: Any, sizes: Mapping[str, Any]) -> str:
    side, channels = sizes.get("image_size", _SIDE), getattr(usual, "num_channels", 3)
    return (
        f"        images = torch.randn({_ROWS}, {channels}, {side}, {side}, generator=generator)\n"
        f"        labels = torch.randint({sizes.get('num_labels', 2)}, ({_ROWS},), generator=generator)\n"
        '        return {"pixel_values": images, "labels": labels}'
    )


def _units(model: nn.Module) -> tuple[str, ...]:
    """Return patterns for the lists of layers that are in no other such list, if they have parameters."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if (
            isinstance(module, nn.ModuleList)
            and len(module) > 1
            and all(map(is_called, module.children()))
            and not is_inside
            and next(module.parameters(), None) is not None
        ):
            found.append(name)
    return tuple(f"{name}.*" for name in found)
