"""What a family is: how its configs are read, and what its tensors are called.

All share one decoder. What is not said here is as in llama.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jkvq.models.config import ModelConfig
from jkvq.models.fields import Fields

# Our name of each parameter, without its last "weight" or "bias", and the name in llama's
# safetensors; {layer} and {expert} stand for numbers. A joined projection that a family names is
# read whole.
LLAMA_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "attention.q": "model.layers.{layer}.self_attn.q_proj",
    "attention.k": "model.layers.{layer}.self_attn.k_proj",
    "attention.v": "model.layers.{layer}.self_attn.v_proj",
    "attention.o": "model.layers.{layer}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{layer}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{layer}.self_attn.k_norm",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "mlp.gate": "model.layers.{layer}.mlp.gate_proj",
    "mlp.up": "model.layers.{layer}.mlp.up_proj",
    "mlp.down": "model.layers.{layer}.mlp.down_proj",
}

# Of families with experts
EXPERT_NAMES = {
    "mlp.router": "model.layers.{layer}.mlp.gate",
    "mlp.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "mlp.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "mlp.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
}


def _as_llama(fields: Fields, base: ModelConfig) -> ModelConfig:
    del fields
    return base


Read = Callable[[str], np.ndarray]  # a tensor by its name; KeyError where there is none


def _as_stored(read: Read) -> Read:
    return read


@dataclass(frozen=True)
class GGUFForm:
    """How llama.cpp keeps a family.

    architecture: its name there.
    fields: the fields of a config.json that its metadata stands for, beside those of every family;
        takes the metadata without the architecture in its keys.
    interleaved: whether the two channels of a rotary pair stand side by side.
    norms_with_one: whether norm weights have the 1 in them that the decoder adds.
    """

    architecture: str
    fields: Callable[[Fields], Mapping[str, Any]] = lambda metadata: {}
    interleaved: bool = False
    norms_with_one: bool = False


@dataclass(frozen=True)
class Family:
    """A family of models.

    name: the ``model_type`` of its config.json.
    read: the architecture from a config and from what it would be of llama.
    names: of tensors, where they are not llama's.
    interleaved: whether the two channels of a rotary pair stand side by side.
    window: of which layers a ``sliding_window`` is: all; if ``use_sliding_window``, those from
        ``max_window_layers`` on; or what ``read`` says.
    reading: how its tensors are read in safetensors, from how stored ones are.
    gguf: how llama.cpp keeps it; None where its files are not read.
    """

    name: str
    read: Callable[[Fields, ModelConfig], ModelConfig] = _as_llama
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    window: Literal["all", "told", "own"] = "all"
    reading: Callable[[Read], Read] = _as_stored
    gguf: GGUFForm | None = None

    @property
    def all_names(self) -> dict[str, str]:
        return {**LLAMA_NAMES, **self.names}
