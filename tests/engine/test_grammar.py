"""Texts that follow a grammar, through the engine, and those beside them."""

import functools
import json

import jsonschema
import pytest

import jkvq
from jkvq.engine.drawing.grammar import json_grammar
from jkvq.engine.engine import Engine
from tests.tiny import tiny_llm

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "sex": {"enum": ["m", "f"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["age", "sex", "tags"],
    "additionalProperties": False,
}


CLOSED = {"type": "object", "additionalProperties": False}
SELF = {"$ref": "#/properties/a"}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_llm(), slots=3, pages=300, prefill_rows=1, prefix_cache=False)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_text_follows_its_schema_and_those_beside_it_their_own_way(engine, ahead, monkeypatch):
    monkeypatch.setattr(engine, "_ahead", ahead)  # 1 as on a GPU
    grammar = json_grammar(SCHEMA)
    plain = engine.submit([5, 6, 7], max_new_tokens=30, ignore_eos=True).result()
    asked = [{"grammar": grammar, "temperature": 1.0, "seed": seed} for seed in range(4)]
    handles = [engine.submit([5, 6, 7], max_new_tokens=100, **each) for each in asked]
    beside = engine.submit([5, 6, 7], max_new_tokens=30, ignore_eos=True)
    found = [handle.result() for handle in handles]
    for each in found:
        jsonschema.validate(json.loads(each.text), SCHEMA)
        assert each.finish_reason == "stop"
    assert len({each.text for each in found}) > 1
    assert (beside.result().tokens, beside.result().logprobs) == (plain.tokens, plain.logprobs)
    alone = engine.submit([5, 6, 7], max_new_tokens=100, **asked[2]).result()
    assert alone.tokens == found[2].tokens


def test_a_text_with_a_grammar_may_begin_again():
    sizes = {"slots": 4, "prefill_rows": 1, "prefix_cache": False}
    roomy, small = (Engine(tiny_llm(), pages=pages, **sizes) for pages in (100, 13))
    asked = {"max_new_tokens": 50, "temperature": 1.0, "grammar": json_grammar(SCHEMA)}
    handles = [
        [engine.submit([n, 8, 9] * 5, seed=n, **asked) for n in range(4)]
        for engine in (roomy, small)
    ]
    expected, found = ([handle.result().text for handle in each] for each in handles)
    assert found == expected
    assert small.stats.preemptions > 0


def test_a_grammar_may_end_where_it_could_go_on(engine):
    """A stop token is allowed there, and it is drawn in the end."""
    asked = {"max_new_tokens": 60, "temperature": 1.0, "seed": 1}
    found = engine.submit([5], grammar=json_grammar({"type": "integer"}), **asked).result()
    assert isinstance(json.loads(found.text), int)
    cut = engine.submit([5], grammar=json_grammar(SCHEMA), max_new_tokens=3).result()
    assert (cut.text, cut.finish_reason) == ('{"a', "length")


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ({"type": "foo"}, "Invalid type: foo"),
        ("start: (", ""),
        ({"maximum": float("nan")}, "expected value at line 1 column 13$"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(200), {}), "recursion limit"),
        ({"$ref": "#"}, "no text follows it to its end: NoExtensionBias$"),
        ({"properties": {"a": SELF}, "required": ["a"], **CLOSED}, "to its end: NoExtensionBias$"),
        (
            {"properties": {"a": {"$ref": "#"}}, "required": ["a"], **CLOSED},
            "to its end: parser er",
        ),
    ],
)
def test_a_grammar_that_is_none_is_refused(engine, grammar, sentence):
    with pytest.raises(
        jkvq.UserError, match=f"^the grammar or schema cannot be used: .*{sentence}"
    ):
        given = grammar if isinstance(grammar, str) else json_grammar(grammar)
        engine.submit([5], grammar=given)
    with pytest.raises(jkvq.UserError, match="a text with a grammar ends where that does"):
        engine.submit([5], grammar="start: /a/", ignore_eos=True)


def test_a_grammar_that_fails_is_its_own_error(engine, monkeypatch):
    asked = {"max_new_tokens": 10, "grammar": json_grammar(SCHEMA)}
    bad, good = engine.submit([5], **asked), engine.submit([5], **asked)
    monkeypatch.setattr(bad.writer.matcher, "take", lambda token: 1 / 0)
    assert "cannot be written: division by zero" in (bad.result().error or "")
    assert good.result().text.startswith('{"age": ') and good.result().error is None
    assert engine.stats.running == 0
