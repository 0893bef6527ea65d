import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkvq
from jkvq.cache.basis import make_basis
from jkvq.cache.layout import empty_cache
from jkvq.cache.shape import CacheShape
from jkvq.engine.forward import forward
from jkvq.models.decoder import logits
from tests.tiny import CONFIG, EOS, model_of, tiny_llm

PROMPTS = ["Hello", "A much longer prompt. " * 8, "x", "Four words of text", "é😀"]


@jax.jit
def _scores(params, tokens, count):
    """Scores after ``count`` tokens, in one pass with nothing stored before."""
    pages = -(-tokens.shape[1] // 8)
    table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
    cache = empty_cache(jkvq.parse_spec("f32,page=8"), CacheShape.of(CONFIG), pages + 1, table)
    basis = make_basis(cache.spec, CacheShape.of(CONFIG), None)
    hidden, _ = forward(CONFIG, params, basis, cache, tokens, count, phase="prefill")
    return logits(CONFIG, params, hidden[0, count[0] - 1])


def _greedy(llm: jkvq.LLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy text by running the whole sequence anew for every token."""
    tokens, logprobs = np.zeros((1, len(prompt) + count), np.int32), []
    tokens[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
        scores = np.asarray(_scores(llm.params, tokens, np.array([at])), np.float64)
        tokens[0, at] = scores.argmax()
        logprobs.append(scores.max() - np.log(np.exp(scores).sum()))
    return tokens[0, len(prompt) :].tolist(), logprobs


def test_generate_greedy_equals_running_the_sequence_anew(tiny):
    result = jkvq.generate(tiny, "Hello there", max_new_tokens=6, ignore_eos=True)
    tokens, logprobs = _greedy(tiny, tiny.tokenizer.encode("Hello there"), 6)
    assert result.tokens == tokens
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-5)
    assert result.text == tiny.tokenizer.decode(tokens)
    assert (result.finish_reason, result.prompt_tokens) == ("length", 11)


def test_generate_gives_a_prompt_the_same_text_in_any_batch(tiny):
    """Drawn or greedy: a batch has both."""
    drawn = jkvq.Options(temperature=1.0, top_p=0.9, max_new_tokens=40)
    options = [dataclasses.replace(drawn, temperature=n % 2) for n in range(len(PROMPTS))]
    together = jkvq.generate(tiny, PROMPTS, options, seed=3)
    seeds = [result.seed for result in together]
    for prompt, own, result in zip(PROMPTS, options, together, strict=True):
        alone = jkvq.generate(tiny, prompt, own, seed=result.seed)
        assert alone.tokens == result.tokens
        assert alone.text == result.text
    reordered = jkvq.generate(tiny, PROMPTS[::-1], options[::-1], seed=seeds[::-1])
    assert [result.text for result in reordered[::-1]] == [result.text for result in together]


def test_generate_of_more_prompts_than_a_prefill_group(tiny):
    prompts = [f"{'ab' * n}" for n in range(1, 20)]
    results = jkvq.generate(tiny, prompts, max_new_tokens=3, ignore_eos=True)
    for index in (0, 7, 8, 18):
        alone = jkvq.generate(tiny, prompts[index], max_new_tokens=3, ignore_eos=True)
        assert results[index].tokens == alone.tokens
        assert results[index].prompt_tokens == 2 * (index + 1)


def test_generate_of_a_prompt_of_several_chunks_equals_running_it_anew(tiny):
    prompt = [(7 * i) % 256 for i in range(700)]
    result = jkvq.generate(tiny, prompt, max_new_tokens=2, ignore_eos=True)
    assert isinstance(result, jkvq.Generation)
    assert result.tokens == _greedy(tiny, prompt, 2)[0]


def test_generate_with_other_seeds_gives_other_texts(tiny):
    options = {"temperature": 1.0, "max_new_tokens": 30}
    results = jkvq.generate(tiny, ["Hi"] * 3, seed=[1, 2, 1], **options)
    assert results[0].tokens == results[2].tokens != results[1].tokens
    assert [result.seed for result in results] == [1, 2, 1]
    fresh = jkvq.generate(tiny, ["Hi"] * 2, **options)
    assert fresh[0].seed != fresh[1].seed
    again = jkvq.generate(tiny, "Hi", seed=fresh[1].seed, **options)
    assert again.tokens == fresh[1].tokens


def test_one_seed_gives_the_prompts_of_a_list_different_texts(tiny):
    options = jkvq.Options(temperature=1.0, max_new_tokens=30, seed=3)
    results = jkvq.generate(tiny, ["Hi"] * 4, options)
    assert len({tuple(result.tokens) for result in results}) == 4
    for result in results:
        assert jkvq.generate(tiny, "Hi", options, seed=result.seed).tokens == result.tokens
    assert jkvq.generate(tiny, "Hi", options).tokens == results[0].tokens


def test_options_may_differ_by_prompt(tiny):
    free = jkvq.generate(tiny, "Hello", max_new_tokens=40, ignore_eos=True)
    printable = [at for at in range(5, 30) if free.text[at : at + 3].isprintable()]
    stop = free.text[printable[0] : printable[0] + 3]
    options = [
        jkvq.Options(ignore_eos=True),
        jkvq.Options(ignore_eos=True, stop_tokens=[free.tokens[20]]),
        jkvq.Options(ignore_eos=True, stop=stop),
        jkvq.Options(ignore_eos=True, max_new_tokens=5),
        jkvq.Options(ignore_eos=True, temperature=1.0, top_k=3, seed=7),
        jkvq.Options(ignore_eos=True, temperature=1.0, seed=7),
        jkvq.Options(ignore_eos=True, repetition_penalty=5.0),
    ]
    options = [
        dataclasses.replace(each, max_new_tokens=min(each.max_new_tokens, 40)) for each in options
    ]
    results = jkvq.generate(tiny, ["Hello"] * len(options), options)
    assert len({tuple(result.tokens) for result in results}) == len(options)
    for each, result in zip(options, results, strict=True):
        assert jkvq.generate(tiny, "Hello", each).tokens == result.tokens
    reasons = [result.finish_reason for result in results]
    assert reasons[:4] == ["length", "stop", "stop", "length"]
    assert results[0].tokens == free.tokens


def test_a_text_that_the_context_cuts_is_said(tiny, capsys):
    jkvq.generate(tiny, [65] * (CONFIG.context - 3), max_new_tokens=5000, ignore_eos=True)
    said = "max_new_tokens=5,000: the model's context of 1,024 tokens ends the text after 3\n"
    assert capsys.readouterr().err == said
    prompts = [[65] * (CONFIG.context - 3), [65] * (CONFIG.context - 2), [65]]
    options = [jkvq.Options(max_new_tokens=3 if at < 2 else 1) for at in range(3)]
    jkvq.generate(tiny, prompts, options, ignore_eos=True)
    said = (
        "max_new_tokens=3: the model's context of 1,024 tokens ends 1 of 3 texts, the first after 2"
    )
    assert capsys.readouterr().err == f"{said}\n"


def test_stream_pieces_add_up_to_the_generation(tiny):
    options = {"temperature": 1.0, "seed": 1, "max_new_tokens": 50, "ignore_eos": True}
    texts, done = ["", ""], {}
    pieces = 0
    for piece in jkvq.stream(tiny, ["Hello", "Bye"], **options):
        texts[piece.index] += piece.text
        pieces += 1
        if piece.generation:
            done[piece.index] = piece.generation
    assert pieces > 8
    whole = jkvq.generate(tiny, ["Hello", "Bye"], **options)
    for index, result in enumerate(whole):
        assert texts[index] == result.text == done[index].text
        assert done[index].tokens == result.tokens


def test_streams_may_run_interleaved(tiny):
    options = {"max_new_tokens": 40, "ignore_eos": True}
    streams = [jkvq.stream(tiny, prompt, **options) for prompt in ("Hello", "Bye")]
    texts = ["", ""]
    for pair in itertools.zip_longest(*streams):
        for index, piece in enumerate(pair):
            texts[index] += piece.text if piece else ""
    assert texts == [jkvq.generate(tiny, p, **options).text for p in ("Hello", "Bye")]


def test_generate_ends_at_stop_tokens(tiny):
    free = jkvq.generate(tiny, "Hello", max_new_tokens=40, ignore_eos=True).tokens
    cut = free.index(free[20])
    stopped = jkvq.generate(
        tiny, "Hello", max_new_tokens=40, ignore_eos=True, stop_tokens=[free[20]]
    )
    assert stopped.tokens == free[: cut + 1]
    assert stopped.text == tiny.tokenizer.decode(free[:cut])
    assert stopped.finish_reason == "stop"


def test_generate_ends_at_the_models_own_stop_token():
    llm = tiny_llm()
    first = jkvq.generate(llm, "Hello", max_new_tokens=1, ignore_eos=True).tokens[0]
    assert first != EOS
    tokenizer = dataclasses.replace(llm.tokenizer, stop_tokens=frozenset({first}))
    result = jkvq.generate(dataclasses.replace(llm, tokenizer=tokenizer), "Hello")
    assert (result.tokens, result.text, result.finish_reason) == ([first], "", "stop")


def test_generate_ends_before_a_stop_string(tiny):
    options = {"temperature": 1.0, "seed": 4, "max_new_tokens": 60, "ignore_eos": True}
    free = jkvq.generate(tiny, "Hello", **options)
    printable = [at for at in range(10, 40) if free.text[at : at + 3].isprintable()]
    stop = free.text[printable[0] : printable[0] + 3]
    result = jkvq.generate(tiny, "Hello", stop=["never this", stop], **options)
    assert result.text == free.text[: free.text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.tokens == free.tokens[: len(result.tokens)]
    assert len(result.tokens) < len(free.tokens)


def test_generate_with_a_repetition_penalty_repeats_less(tiny):
    plain = jkvq.generate(tiny, "Hello", max_new_tokens=60, ignore_eos=True).tokens
    varied = jkvq.generate(
        tiny, "Hello", max_new_tokens=60, ignore_eos=True, repetition_penalty=5.0
    ).tokens
    assert len(set(varied)) > len(set(plain))


def test_generate_stops_where_the_context_ends(tiny):
    prompt = [65] * (CONFIG.context - 3)
    result = jkvq.generate(tiny, prompt, max_new_tokens=50, ignore_eos=True)
    assert isinstance(result, jkvq.Generation)
    assert (len(result.tokens), result.finish_reason) == (3, "length")


def test_generate_compiles_once_for_ten_lengths_in_one_bucket(tiny):
    compiled = []

    def listen(event, duration_secs, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jkvq.generate(tiny, "a" * 33, max_new_tokens=5)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for length in range(34, 94, 6):
        jkvq.generate(tiny, "b" * length, max_new_tokens=length % 9 + 1)
    assert compiled == []
    jax.jit(lambda x: x + 1)(0)  # a program that nobody has compiled: the listener does listen
    assert compiled


BAD = [
    ("a", {"chat": True}, "no chat template"),
    ("a", {"max_new_tokens": 0}, "max_new_tokens=0: a whole number, 1 or more"),
    ("a", {"options": {"temperature": 1.0}}, "{'temperature': 1.0} is no jkvq.Options: give one"),
    ("a", {"temprature": 1.0}, "no option 'temprature': did you mean temperature"),
    ("a", {"stop_tokens": [257]}, "stop_tokens: token 257 is outside the vocabulary of 257 tokens"),
    ([], {}, "the list of prompts is empty"),
    (["a", ""], {}, "the prompt is empty"),
]


@pytest.mark.parametrize(("prompts", "options", "sentence"), BAD)
@pytest.mark.parametrize("call", [jkvq.generate, jkvq.stream])
def test_bad_input_is_refused_before_anything_runs(tiny, call, prompts, options, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        call(tiny, prompts, **options)


def test_only_what_load_returns_can_generate(tiny):
    with pytest.raises(jkvq.UserError, match=r"cannot generate: give what jkvq\.load returns"):
        jkvq.generate(model_of(tiny), "Hi")  # pyright: ignore


def test_batch_larger_than_the_pool_says_what_would_fit(tiny):
    llm = dataclasses.replace(tiny, pool_tokens=64)  # 8 pages of 8 tokens
    with pytest.raises(jkvq.UserError, match=r"pool of 64 tokens .*: 4 of them would fit"):
        jkvq.generate(llm, ["abcd"] * 5, max_new_tokens=12)  # 2 pages each
    with pytest.raises(jkvq.UserError, match="0 of them would fit"):
        jkvq.generate(llm, "a" * 60, max_new_tokens=12)
    fits = jkvq.generate(llm, ["abcd"] * 4, max_new_tokens=12, ignore_eos=True)
    assert [len(result.tokens) for result in fits] == [12] * 4


def test_batch_larger_than_the_memory_says_what_would_fit(tiny, monkeypatch):
    monkeypatch.setattr("jkvq.engine.capacity.free_bytes", lambda: 100_000)
    with pytest.raises(jkvq.UserError, match=r"100 KB of free memory has room for .* would fit"):
        jkvq.generate(tiny, ["a" * 100] * 50, max_new_tokens=12)


def test_scores_that_are_not_numbers_end_in_a_sentence(tiny):
    params = {**tiny.params, "norm": {"weight": jnp.full(CONFIG.width, jnp.nan)}}
    with pytest.raises(jkvq.UserError, match=r"token 1 of prompt 0 are not numbers \(NaN\)"):
        jkvq.generate(dataclasses.replace(tiny, params=params), "Hello")


def test_scores_that_are_not_numbers_end_their_own_prompt_only(tiny):
    # Token 65 ("A" is another) has an embedding that is not a number; nothing else reads it.
    embedding = tiny.params["embedding"].at[65].set(jnp.nan)
    head = {"weight": jnp.where(jnp.isnan(embedding), 0.0, embedding)}
    params = {**tiny.params, "embedding": embedding, "head": head}
    llm = dataclasses.replace(tiny, params=params)
    good, bad = jkvq.generate(llm, [[3, 5, 7], [3, 65, 7]], max_new_tokens=6, ignore_eos=True)
    assert (bad.finish_reason, bad.tokens, bad.text) == ("error", [], "")
    assert "token 1 of prompt 1 are not numbers (NaN)" in (bad.error or "")
    alone = jkvq.generate(llm, [3, 5, 7], max_new_tokens=6, ignore_eos=True)
    assert good.error is None and good.tokens == alone.tokens


@pytest.mark.parametrize(
    ("cache", "far"), [("bf16", 0.2), ("saw-int4", 0.5), ("quarot-int2,sink=4,recent=8", 0.5)]
)
def test_generate_in_bfloat16(tiny, cache, far):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params)
    llm = jkvq.with_cache(dataclasses.replace(model_of(tiny), params=params), f"{cache},page=8")
    result = jkvq.generate(llm, "Hello", max_new_tokens=20, ignore_eos=True)
    assert len(result.tokens) == 20
    exact = jkvq.generate(tiny, "Hello", max_new_tokens=1, ignore_eos=True)
    assert abs(result.logprobs[0] - exact.logprobs[0]) < far


def test_smollm2_answers_in_chat(smollm2):
    question = "What is the capital of France? Answer in one word."
    by_text = jkvq.generate(smollm2, question, max_new_tokens=12)
    by_messages = jkvq.generate(smollm2, [{"role": "user", "content": question}], max_new_tokens=12)
    assert "Paris" in by_text.text
    assert isinstance(by_messages, jkvq.Generation)
    assert by_messages.tokens == by_text.tokens
    assert by_text.prompt_tokens > len(smollm2.tokenizer.encode(question))


@pytest.mark.parametrize(
    ("kernels", "window_bits"),
    [
        ("interpret", 16),
        *(pytest.param("pallas", bits, marks=pytest.mark.gpu) for bits in (16, 8)),
    ],
)
def test_generate_through_the_kernels_gives_the_reference_tokens(kernels, window_bits):
    """A prompt longer than its windows, so that pages are packed as it goes."""
    wide = dataclasses.replace(CONFIG, layers=1, head_dim=64, rope_divisors=(1.0,) * 32)
    llm = tiny_llm(f"saw-int4,sink=4,recent=8,page=16,window_bits={window_bits}", config=wide)
    prompts = ["A prompt that is longer than both windows of the cache.", "Short"]
    texts = [
        [
            result.tokens
            for result in jkvq.generate(
                dataclasses.replace(llm, implementation=implementation),
                prompts,
                chat=False,
                max_new_tokens=24,
                ignore_eos=True,
            )
        ]
        for implementation in ("reference", kernels)
    ]
    assert texts[0] == texts[1]
