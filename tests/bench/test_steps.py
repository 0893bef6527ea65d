"""Steps that are timed: what they read, and how far they get."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.bench import steps
from jkvq.bench.shapes import SHAPES, random_model, shape_config, with_any_cache
from jkvq.bench.steps import bench_decode, bench_prefill, step_bytes, steps_figure, time_decode
from jkvq.cache.footprint import sequence_bytes
from jkvq.cache.shape import CacheShape
from jkvq.models.config import Experts
from jkvq.models.decoder import weight_bytes
from tests.tiny import CONFIG, tiny_model


@pytest.fixture(scope="module")
def llms() -> dict[str, jkvq.LLM]:
    names = {"bf16": "bf16,page=8", "windows": "int4,page=8,sink=8,recent=16"}
    model = tiny_model()
    return {name: with_any_cache(model, jkvq.parse_spec(cache)) for name, cache in names.items()}


def test_every_batch_and_context_is_timed_with_every_cache(llms):
    found = list(bench_decode(llms, [1, 2], [16, 40]))
    assert [(x.context, x.batch, x.cache) for x in found] == [
        (context, batch, cache) for context in (16, 40) for batch in (1, 2) for cache in llms
    ]
    for each in found:
        assert each.milliseconds is not None and each.milliseconds > 0
        assert each.tokens_per_second == pytest.approx(1e3 * each.batch / each.milliseconds)
    base, other = found[:2]
    assert base.over_bf16 == 1
    assert base.milliseconds and other.milliseconds
    assert other.over_bf16 == pytest.approx(base.milliseconds / other.milliseconds)
    picture = steps_figure(found, "tiny")
    assert [axes.get_title() for axes in picture.axes] == [
        *("16 tokens each", "40 tokens each"),
        "batch 2",
    ]
    assert {line.get_label() for line in picture.axes[0].lines} == set(llms)
    single = steps_figure([x for x in found if x.batch == 2], "tiny")
    assert [axes.get_title() for axes in single.axes] == ["batch 2"]
    assert single.axes[0].get_legend() is not None


def test_the_largest_batch_fills_the_memory(llms, monkeypatch):
    one = sequence_bytes(llms["bf16"].spec, CacheShape.of(CONFIG), 1000)
    monkeypatch.setattr(steps, "free_bytes", lambda: int(3.5 * one / 0.95))
    assert steps.largest_batch(llms["bf16"], 1000) == 3


def test_random_weights_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("jkvq.models.model.free_bytes", lambda: 1000)
    with pytest.raises(jkvq.UserError, match=r"the weights take 16\.4 GB and 1 KB are free$"):
        random_model(shape_config("qwen3-8b"))


def test_pages_are_filled_where_they_lie():
    array = jax.block_until_ready(jnp.ones((64, 512), jnp.uint16) * jnp.uint16(3))
    place = array.unsafe_buffer_pointer()
    filled = steps._random_words(array)
    assert array.is_deleted() and filled.unsafe_buffer_pointer() == place
    numbers = jax.lax.bitcast_convert_type(filled, jnp.float16)
    assert 0 < numbers.min() < numbers.max() < 1


def test_a_batch_for_which_memory_runs_out_ends_no_run(llms, monkeypatch):
    def time_out(_llm, batch, _context):
        if batch == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        if batch == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")
        return 1.0, 0.0, None

    monkeypatch.setattr(steps, "time_decode", time_out)
    found = list(bench_decode(llms, [1, 2], [16]))
    assert [each.milliseconds for each in found] == [1.0, 1.0, None, None]
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        list(bench_decode(llms, [3], [16]))


def test_a_step_reads_weights_and_cache(llms):
    llm = llms["bf16"]
    weights = weight_bytes(CONFIG, "float32") - CONFIG.vocab * CONFIG.width * 4
    one = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 2  # bytes of a token
    assert not CONFIG.tied
    assert step_bytes(llm, 3, 16) == weights + 3 * 16 * one


def test_a_step_is_behind_the_context(llms, monkeypatch):
    lengths, real = [], steps.decode_burst

    def seen(config, params, basis, cache, *rest):
        lengths.append(np.asarray(cache.sequences.length).tolist())
        assert all(np.asarray(x).any() for x in jax.tree.leaves(cache.groups))
        return real(config, params, basis, cache, *rest)

    monkeypatch.setattr(steps, "decode_burst", seen)
    time_decode(llms["windows"], 2, 40)
    assert lengths[0] == [40, 40]
    assert lengths[1][0] > 40


def test_what_a_device_waits_for_its_first_launch_does_not_count(llms, monkeypatch):
    clock, idle = 0.0, True

    def burst(_config, _params, _basis, cache, state, _keep, _known, steps, *_):
        nonlocal clock, idle
        clock += 0.006 * idle + 0.002 * steps
        idle = False
        return cache, state, state.token

    def wait(results):
        nonlocal idle
        idle = True
        return results

    monkeypatch.setattr(steps, "decode_burst", burst)
    monkeypatch.setattr(steps.jax, "block_until_ready", wait)
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock)
    ms, _, _ = time_decode(llms["bf16"], 1, 16)
    assert ms == pytest.approx(2.0)


def test_what_does_not_fit_is_said(llms, monkeypatch):
    monkeypatch.setattr(steps, "free_bytes", lambda: 10_000)
    assert time_decode(llms["bf16"], 100, 1000) == (None, 0.0, None)
    row = next(bench_decode({"bf16": llms["bf16"]}, [100], [1000]))
    assert row.milliseconds is None and row.tokens_per_second is None
    row = next(bench_prefill({"bf16": llms["bf16"]}, [100], [1000]))
    assert row.tokens_per_second is None


def test_prompts_are_timed(llms):
    found = list(bench_prefill(llms, [2], [24]))
    assert [x.cache for x in found] == list(llms)
    assert all(x.tokens_per_second is not None and x.tokens_per_second > 0 for x in found)
    assert found[0].over_bf16 == 1


def test_shapes_have_the_parameters_of_their_names():
    found = {name: weight_bytes(config, "bfloat16") / 2e9 for name, config in SHAPES.items()}
    billions = {"qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5}
    assert found == pytest.approx(billions, rel=0.02)
    with pytest.raises(jkvq.UserError, match="shape 'qwen3-9b' is not known"):
        shape_config("qwen3-9b")


def test_random_weights_make_numbers_of_calibrated_caches():
    model = random_model(CONFIG, "float32")
    llm = with_any_cache(model, jkvq.parse_spec("jkvq-int2,page=16,sink=16,recent=32"))
    ms, _, split = time_decode(llm, 1, 64)
    assert (split is None) == (jax.default_backend() == "cpu")
    assert ms is not None and ms > 0


def test_a_step_reads_the_experts_that_are_chosen():
    experts = Experts(number=16, chosen=3, width=8)
    config = dataclasses.replace(CONFIG, experts=experts)
    llm = with_any_cache(random_model(config, "float32"), jkvq.parse_spec("bf16,page=8"))
    matrix = 3 * experts.width * config.width * 4  # gate, up and down of one expert
    rest = step_bytes(llm, 1, 16) - config.layers * experts.chosen * matrix
    token = 2 * config.layers * config.kv_heads * config.head_dim * 2
    rng = np.random.default_rng(0)

    def distinct(batch: int) -> int:
        return len({each for _ in range(batch) for each in rng.permutation(16)[:3]})

    for batch in (2, 7):
        chosen = np.mean([distinct(batch) for _ in range(2000)])
        expected = rest + (batch - 1) * 16 * token + config.layers * chosen * matrix
        assert step_bytes(llm, batch, 16) == pytest.approx(expected, rel=2e-3)
    ms, _, _ = time_decode(llm, 2, 16)
    assert ms is not None and ms > 0
