"""What a body asks for, as the engine runs it."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from jkvq.engine.options import Options, options_by_prompt
from jkvq.server.asked import read_asked
from jkvq.server.bodies import ChatBody, CompletionBody


def test_options_are_checked_once_however_many_texts_there_are(tiny, monkeypatch):
    expected = options_by_prompt(None, {"seed": 3}, 6)
    check, checked = Options.__post_init__, []
    monkeypatch.setattr(Options, "__post_init__", lambda self: checked.append(check(self)))
    many = read_asked("completion", CompletionBody(prompt=["a"] * 500, n=128))
    assert (many.texts, len(checked)) == (64_000, 1)
    asked = read_asked("completion", CompletionBody(prompt=["a", "b"], n=3, seed=3))
    engine: Any = SimpleNamespace(llm=tiny, budget=lambda tokens, asked: asked)
    found = asked.encoded(engine)
    assert [options.seed for _, options in found] == [each.seed for each in expected]
    assert {options.max_new_tokens for _, options in found} == {16}
    assert len(checked) == 2


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [[1]] * 500 + [["a"] * 500]}),
        (ChatBody, {"messages": [5] * 500}),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 500}]}),
    ],
)
def test_a_body_that_is_wrong_in_many_places_is_wrong_in_the_first(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 5
