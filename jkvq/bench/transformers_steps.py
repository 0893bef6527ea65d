"""The same steps through ``transformers``' own generate, in PyTorch on the same device.

In a process of its own: a GPU's memory is given to one library at a time. The weights are random
and the context is random numbers in a cache of 16 bits, as in steps.py.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jkvq.models.config import ModelConfig
from jkvq.support.errors import UserError

_NEW, _WARM = 32, 4  # tokens that are timed, and before


def bench_transformers(
    config: ModelConfig, batches: Sequence[int], contexts: Sequence[int]
) -> dict[tuple[int, int], float | None]:
    """Milliseconds of a step by batch and context; None where memory does not suffice."""
    asked = {
        "config": _as_qwen3(config),
        "steps": [(batch, context) for context in contexts for batch in batches],
    }
    done = subprocess.run(
        [sys.executable, "-m", "jkvq.bench.transformers_steps"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"transformers did not run ({last}): pip install torch transformers")
    found = json.loads(done.stdout.splitlines()[-1])
    return {(batch, context): ms for batch, context, ms in found}


def _as_qwen3(config: ModelConfig) -> dict[str, Any]:
    """As ``transformers`` names it."""
    if config.family != "qwen3":
        raise UserError(f"a shape of family {config.family}: only shapes of qwen3 are compared")
    fields = asdict(config)
    names = {
        "vocab_size": "vocab",
        "hidden_size": "width",
        "intermediate_size": "mlp_width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "max_position_embeddings": "context",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_theta",
        "tie_word_embeddings": "tied",
    }
    return {theirs: fields[ours] for theirs, ours in names.items()}


def _main() -> None:
    """Reads what is asked for, and prints what was measured as its last line."""
    import torch  # noqa: PLC0415
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    asked = json.load(sys.stdin)
    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16 if on_gpu else torch.float32)
    model = Qwen3ForCausalLM(Qwen3Config(**asked["config"])).eval()
    found = []
    for batch, context in asked["steps"]:
        try:
            found.append((batch, context, _milliseconds(torch, model, batch, context)))
        except torch.cuda.OutOfMemoryError:
            found.append((batch, context, None))
    print(json.dumps(found))


def _milliseconds(torch, model, batch: int, context: int) -> float:
    from transformers import DynamicCache  # noqa: PLC0415

    config, cache = model.config, DynamicCache()
    shape = batch, config.num_key_value_heads, context, config.head_dim
    with torch.inference_mode():
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        for new in (_WARM, _NEW):
            tokens = torch.zeros((batch, cache.get_seq_length() + 1), dtype=torch.long)
            start = time.perf_counter()
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken = time.perf_counter() - start
    return taken / _NEW * 1e3


if __name__ == "__main__":
    _main()
