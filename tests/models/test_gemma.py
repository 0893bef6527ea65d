"""Gemma 3 as it is published: its GGUF file against transformers on the same numbers."""

import numpy as np
import pytest
from gguf.quants import dequantize

import jkvq
from jkvq.evaluation.corpus import first_tokens, read_text
from jkvq.evaluation.perplexity import perplexity
from jkvq.models.formats.catalog import cached_file
from jkvq.models.formats.gguf_header import read_header

NAME = "gemma-3-270m"
# llama.cpp's names of a layer's tensors -> transformers', written out
TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def transformers_model():
    """What the file holds, in transformers' own module."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    path = cached_file(NAME)
    stored = read_header(path).tensors

    def read(name: str) -> "torch.Tensor":
        info = stored[f"{name}.weight"]
        raw = np.fromfile(path, np.uint8, count=info.bytes, offset=info.offset)
        rows = info.shape[0] if len(info.shape) > 1 else 1
        tensor = dequantize(raw.reshape(rows, -1), info.kind).reshape(info.shape)
        return torch.from_numpy(tensor - 1 if "norm" in name else tensor)

    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    model = Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    state = {"model.embed_tokens": read("token_embd"), "model.norm": read("output_norm")}
    for layer in range(18):
        for theirs, name in TENSORS.items():
            state[f"model.layers.{layer}.{name}"] = read(f"blk.{layer}.{theirs}")
    state["lm_head"] = state["model.embed_tokens"]
    model.load_state_dict({f"{name}.weight": tensor for name, tensor in state.items()})
    return model


@pytest.mark.slow
def test_perplexity_equals_transformers(wikitext):
    torch = pytest.importorskip("torch")
    if not cached_file(NAME).exists():
        pytest.skip(f"{NAME} is not cached: fetch it with `jkvq inspect --model {NAME}`")
    model = jkvq.load_model(NAME, dtype="float32")
    tokens = first_tokens(model.tokenizer, read_text(wikitext), 1024)
    with torch.no_grad():
        scores = torch.log_softmax(transformers_model()(torch.tensor([tokens])).logits[0], -1)
    expected = float(torch.exp(-scores[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).mean()))
    found = {name: perplexity(jkvq.with_cache(model, name), tokens).ppl for name in ("f32", "bf16")}
    assert found["f32"] == pytest.approx(expected, rel=5e-4)
    assert found["bf16"] == pytest.approx(expected, rel=5e-3)
