"""Every family against transformers, on small random weights in float32.

One program a layer kind for each family; `-m slow` runs the other ways too.
"""

import jax.numpy as jnp
import pytest

from jkvq.cache.specs.spec_text import parse_spec
from jkvq.models.formats.hf_folder import HFFolder
from tests.models.helpers import FAMILY_CASES, save_random_model
from tests.models.test_decoder import Pair, assert_equal_transformers, prompt, random_pair

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=FAMILY_CASES)
def pair(request, tmp_path_factory) -> Pair:
    return random_pair(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_equal_transformers_in_uneven_chunks_of_a_ragged_batch(pair):
    prompts = [prompt(3, 29), prompt(4, 7), prompt(5, 16)]
    counts = [[1, 7, 0], [12, 0, 11], [16, 0, 5]]
    assert_equal_transformers(pair, prompts, counts, width=32, phase="prefill")


@pytest.mark.slow
def test_logits_equal_transformers_when_prefilled_at_once(pair):
    prompts = [prompt(seed, 29) for seed in range(3)]
    assert_equal_transformers(pair, prompts, [[29] * 3], width=32, phase="prefill")


@pytest.mark.slow
def test_logits_equal_transformers_when_decoded_token_by_token(pair):
    prompts = [prompt(seed, 29) for seed in range(3)]
    assert_equal_transformers(pair, prompts, [[1] * 3] * 29, width=1, phase="decode")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "case",
    [
        "gemma3",  # a window of 18 tokens, of which the oldest are packed once it has left the sink
        pytest.param("gpt-oss", marks=pytest.mark.slow),  # of 11, and sinks that are no tokens
        pytest.param("deepseek-v2-lite", marks=pytest.mark.slow),  # latents, in windows too
    ],
)
def test_logits_equal_transformers_in_a_cache_with_windows(case, phase, tmp_path):
    theirs = save_random_model(case, tmp_path)
    ours = HFFolder(tmp_path)
    pair = Pair(theirs, ours, ours.params(jnp.float32))
    prompts = [prompt(seed, 29) for seed in range(3)]
    counts = [[n] * 3 for n in (1, 13, 5, 9, 1)] if phase == "prefill" else [[1] * 3] * 29
    width, spec = (32, 1)[phase == "decode"], parse_spec("f32,page=8,sink=8,recent=8")
    how = {"width": width, "phase": phase, "spec": spec}
    assert_equal_transformers(pair, prompts, counts, **how)
