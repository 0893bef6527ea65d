"""lm-evaluation-harness asks our models what it asks its own model of the same weights."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

import jkvq
from jkvq.models.tokenizer import Tokenizer
from tests.models.helpers import save_random_model

try:
    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM  # with torch and accelerate
    from lm_eval.tasks import TaskManager
    from transformers.cache_utils import DynamicCache
except ImportError as missing:
    pytest.skip(f"needs lm_eval, torch and accelerate: {missing}", allow_module_level=True)

from jkvq.evaluation.lm_eval import HarnessLM, generation_options
from jkvq.loading.lm_eval import LoadedLM, run_harness

# As many characters as the small random models have tokens, with one that ends a text.
ALPHABET = [*map(chr, range(32, 127)), "\n", "<end>"]
END = ALPHABET.index("<end>")
MOST = 64  # tokens that are read at once
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def characters(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters; ``bos`` has every text begin with a token."""
    vocabulary = {character: index for index, character in enumerate(ALPHABET)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<end> $A", special_tokens=[("<end>", END)]
        )
    begins = {"bos_token": "<end>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **begins)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = save_random_model("llama", path)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id = None, END
    model.save_pretrained(path)
    characters().save_pretrained(path)
    return path


def harness_s_own(folder: Path, **arguments: Any) -> Any:
    how = {"dtype": "float32", "device": "cpu", "batch_size": 8, "max_length": MOST}
    return HFLM(**{"pretrained": str(folder)} | how | arguments)


@pytest.fixture(scope="module")
def theirs(folder) -> Any:
    return harness_s_own(folder)


@pytest.fixture(scope="module")
def llm(folder) -> jkvq.LLM:
    return jkvq.load(folder, cache="f32", dtype="float32", check=False)


@pytest.fixture(scope="module")
def ours(llm) -> HarnessLM:
    return HarnessLM(llm, max_length=MOST)


def requests(kind: Any, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, place) for place, each in enumerate(arguments)]


QUESTION = "What is 24 times 10?\nAnswer:"
PAIRS = requests(
    "loglikelihood",
    (QUESTION, " 240"),
    (QUESTION, " A"),
    ("", "There is nothing before this text."),
    (QUESTION, " B"),
    ("Spaces that end a context ", "move on"),
    ("A text that is too long loses its beginning. " * 3, "This is read."),
    ("x", "y" * MOST),
)


def logs(model: Any, asked: list[Instance]) -> list[float]:
    return [log for log, _ in model.loglikelihood(asked, disable_tqdm=True)]


@pytest.mark.parametrize("bos", [False, True])
def test_likelihoods_are_those_of_the_harness_s_own_model(folder, llm, bos):
    tokenizer = characters(bos=bos)
    own = HarnessLM(
        dataclasses.replace(llm, tokenizer=Tokenizer(tokenizer, frozenset({END}))), max_length=MOST
    )
    reference = harness_s_own(folder, tokenizer=tokenizer)
    (favourite,) = reference.generate_until(
        requests("generate_until", (QUESTION, {"until": [], "max_gen_toks": 3})), disable_tqdm=True
    )
    asked = [*PAIRS, *requests("loglikelihood", (QUESTION, favourite))]
    expected = reference.loglikelihood(asked, disable_tqdm=True)
    found = own.loglikelihood(asked, disable_tqdm=True)
    assert [log for log, _ in found] == pytest.approx([log for log, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [greedy for _, greedy in found] == [False] * len(PAIRS) + [True]


def test_a_16_bit_cache_is_the_harness_s_own_model_with_16_bit_keys_and_values(
    folder, theirs, monkeypatch
):
    found = logs(LoadedLM(str(folder), "bf16", dtype="float32", max_length=MOST), PAIRS)
    exact = logs(theirs, PAIRS)
    update = DynamicCache.update

    def rounded(self, keys, values, *more, **how):
        keys, values = (x.bfloat16().float() for x in (keys, values))
        return update(self, keys, values, *more, **how)

    monkeypatch.setattr(DynamicCache, "update", rounded)
    assert found == pytest.approx(logs(theirs, PAIRS), abs=1e-4)
    assert found == pytest.approx(exact, rel=1e-3)
    assert found != pytest.approx(exact, abs=1e-3)


def test_a_coded_cache_is_close_to_the_harness_s_own_model_and_not_equal(folder, theirs):
    found = logs(LoadedLM(str(folder), "int4", dtype="float32", max_length=MOST), PAIRS)
    expected = logs(theirs, PAIRS)
    assert found == pytest.approx(expected, rel=0.05, abs=0.2)
    assert all(abs(a - b) > 1e-3 for a, b in zip(found, expected, strict=True))


def test_whole_texts_are_scored_in_the_windows_of_the_harness(ours, theirs):
    texts = ("Short.", "A text of several windows. " * 6)
    asked = requests("loglikelihood_rolling", *((text,) for text in texts))
    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(expected, abs=1e-3)


def test_greedy_texts_are_those_of_the_harness_s_own_model(ours, theirs):
    asked = requests(
        "generate_until",
        (QUESTION, {"until": ["\n\n"], "max_gen_toks": 16}),
        ("Once", {"until": ["e", "w"], "max_gen_toks": 30, "do_sample": False}),
        ("A prompt that is too long loses its beginning. " * 3, {"max_gen_toks": 40}),
        ("Once", {"until": "A%", "max_new_tokens": 30, "temperature": 0.0}),
    )
    found = ours.generate_until(asked)
    assert found == theirs.generate_until(asked, disable_tqdm=True)
    assert found[1].startswith(found[3]) and len(found[3]) < len(found[1]) < 30


def test_generation_arguments():
    asked = {"until": ["a", ""], "max_gen_toks": 12, "do_sample": True, "temperature": 0.7}
    options = generation_options({**asked, "top_p": 0.9, "top_k": 5, "seed": 4}, place=3)
    assert dataclasses.replace(options, seed=None) == jkvq.Options(
        max_new_tokens=12, stop="a", temperature=0.7, top_p=0.9, top_k=5
    )
    assert options.seed == generation_options({**asked, "seed": 4}, place=3).seed
    others = generation_options(asked, place=3), generation_options({**asked, "seed": 4}, place=2)
    assert len({options.seed, *(other.seed for other in others)}) == 3
    greedy = generation_options({"do_sample": False, "temperature": 0.7}, place=0)
    assert (greedy.temperature, greedy.max_new_tokens, greedy.stop) == (0.0, 256, ())
    with pytest.raises(jkvq.UserError, match="no generation argument 'num_beams': known: until"):
        generation_options({"num_beams": 4}, place=0)


def test_samples_have_streams_of_their_own(ours):
    drawn = requests("generate_until", *[("Once", {"temperature": 1.0, "max_gen_toks": 9})] * 3)
    texts = ours.generate_until(drawn)
    assert len(set(texts)) == 3
    assert ours.generate_until(drawn) == texts


def test_conversations_are_written_as_by_the_harness_s_own_model(llm, theirs, monkeypatch):
    tokenizer = characters()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(theirs, "tokenizer", tokenizer)
    own = HarnessLM(dataclasses.replace(llm, tokenizer=Tokenizer(tokenizer, frozenset({END}))))
    talk = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    assert own.apply_chat_template(talk) == "[user]Hi[assistant]"
    begun = [*talk, {"role": "assistant", "content": "So"}]
    for model in (own, theirs):
        assert model.apply_chat_template(begun, False) == "[user]Hi[assistant]So"
        assert model.chat_template(True) == TEMPLATE
    assert own.tokenizer_name == theirs.tokenizer_name


def test_what_was_asked_and_answered_can_be_kept(ours, monkeypatch):
    kept = {}

    class Hook:
        def add_partial(self, kind, asked, answer):
            kept[kind, asked] = answer

    monkeypatch.setattr(ours, "cache_hook", Hook())
    (log,) = ours.loglikelihood(PAIRS[:1], disable_tqdm=True)
    (total,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", ("Short.",)))
    assert kept == {
        ("loglikelihood", (QUESTION, " 240")): log,
        ("loglikelihood_rolling", ("Short.",)): total,
    }


def write_task(folder: Path, name: str, docs: list[dict], **config: Any) -> None:
    """A task of the harness over a file of JSON lines; JSON is YAML."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    dataset = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "datasets")}
    metrics = [{"metric": name} for name in config.pop("metrics")]
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": dataset, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps(task | config | {"metric_list": metrics}))


@pytest.fixture
def tasks(tmp_path, theirs) -> Path:
    """A multiple choice, sums as `arithmetic` asks them, and free answers; half of each right."""
    sums = [f"What is {i} plus {i * i}?\nAnswer:" for i in range(4)]
    short = {"until": ["\n"], "max_gen_toks": 4}
    greedy = theirs.generate_until(
        requests("generate_until", *((text, short) for text in sums)), disable_tqdm=True
    )
    right = [text if place % 2 else "wrong" for place, text in enumerate(greedy)]
    choices = [{"q": text, "of": [right[1], " 7", " 12"], "answer": 1} for text in sums]
    arguments = {"doc_to_text": "{{q}}", "doc_to_target": "{{answer}}", "target_delimiter": ""}
    answers = [{"q": text, "answer": answer} for text, answer in zip(sums, right, strict=True)]
    write_task(
        *(tmp_path, "choice", choices),
        **(arguments | {"output_type": "multiple_choice", "doc_to_choice": "{{of}}"}),
        metrics=["acc", "acc_norm"],
    )
    sums_config = arguments | {"output_type": "loglikelihood"}
    write_task(tmp_path, "sums", answers, **sums_config, metrics=["acc", "perplexity"])
    free = arguments | {"output_type": "generate_until", "generation_kwargs": short}
    write_task(tmp_path, "free", answers, **free, metrics=["exact_match"])
    return tmp_path


def test_the_harness_finds_the_same_with_both_models(tasks, ours, theirs):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found, expected = (
        dict[str, Any](
            simple_evaluate(
                model, tasks=["choice", "sums", "free"], task_manager=manager, bootstrap_iters=0
            )
            or {}
        )
        for model in (ours, theirs)
    )
    for task, metrics in expected["results"].items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers == pytest.approx({name: found["results"][task][name] for name in numbers})
    assert found["results"]["sums"]["acc,none"] == 0.5
    assert found["results"]["free"]["exact_match,none"] == 0.5
    samples = zip(found["samples"]["choice"], expected["samples"]["choice"], strict=True)
    for own, reference in samples:
        assert own["arguments"] == reference["arguments"]
        for (a, _), (b, _) in zip(own["filtered_resps"], reference["filtered_resps"], strict=True):
            assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.filterwarnings("error:os.fork")  # beside the threads of JAX it may hang
def test_the_command_line_of_the_harness_knows_the_model(tasks, folder, monkeypatch):
    # Its thousands of own tasks take many seconds to find.
    own = {"include_path": str(tasks), "include_defaults": False}
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: TaskManager(**own))
    monkeypatch.setattr(sys, "argv", [])
    arguments = f"model={folder},cache='f32,page=64',dtype=float32,max_length={MOST}"
    asked = {
        "model": "jkvq",
        "model_args": arguments,
        "tasks": "sums",
        "output_path": tasks / "out",
    }
    with mock.patch.dict(os.environ):
        run_harness([part for name, given in asked.items() for part in (f"--{name}", str(given))])
    (written,) = (tasks / "out").rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["results"]["sums"]["acc,none"] == 0.5
    assert (found["model_source"], found["max_length"]) == ("jkvq", MOST)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"pretrained": "x"}, "no argument 'pretrained': known: model, cache, .*max_length"),
        ({"page": 16}, "no argument 'page': .* a cache with commas stands in quotes"),
        ({"max_length": 257}, "max_length=257: from 2 to the model's context of 256 tokens"),
    ],
)
def test_model_arguments_that_cannot_be_are_refused(folder, arguments, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        LoadedLM(**{"model": str(folder), "cache": "f32", "dtype": "float32"} | arguments)


def test_requests_that_cannot_be_are_refused(ours, llm):
    with pytest.raises(jkvq.UserError, match=r"'y{65}' has 65 tokens: 1 to 64 can be scored"):
        ours.loglikelihood(requests("loglikelihood", ("x", "y" * 65)), disable_tqdm=True)
    with pytest.raises(jkvq.UserError, match="'' has 0 tokens"):
        ours.loglikelihood(requests("loglikelihood", ("x", "")), disable_tqdm=True)
    with pytest.raises(jkvq.UserError, match="max_gen_toks=64: a max_length of 64 tokens"):
        ours.generate_until(requests("generate_until", ("x", {"max_gen_toks": 64})))
    with pytest.raises(jkvq.UserError, match=r"no chat template: .* without --apply_chat_template"):
        ours.apply_chat_template([{"role": "user", "content": "Hi"}])
    endless = characters()
    endless.eos_token = None
    own = HarnessLM(dataclasses.replace(llm, tokenizer=Tokenizer(endless, frozenset())))
    with pytest.raises(jkvq.UserError, match="no token that begins or ends a text"):
        own.loglikelihood(requests("loglikelihood", ("", "x")), disable_tqdm=True)
    assert own.tok_encode("ab") == [65, 66]
