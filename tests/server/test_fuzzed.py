"""Whatever a body holds, it gets an answer or an error in OpenAI's form, and the server goes on."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jkvq.server.bodies import ChatBody, CompletionBody
from tests.server.test_errors import error_of

NAMES = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "echo", "tools", "user"})
# Halves of characters and numbers that are none among them
SCALARS = st.none() | st.booleans() | st.integers(-2, 3) | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({"role": st.text() | VALUES, "content": st.text() | VALUES})
PROMPTS = {
    "/v1/chat/completions": ("messages", st.lists(MESSAGE, min_size=1, max_size=3)),
    "/v1/completions": ("prompt", st.text() | st.lists(st.integers(0, 300), max_size=5)),
}


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(PROMPTS)), st.data())
def test_no_body_is_answered_with_a_failure(served, path, data):
    name, prompt = PROMPTS[path]
    body = data.draw(st.dictionaries(st.sampled_from(NAMES) | st.text(), VALUES, max_size=2))
    body[name] = data.draw(prompt | VALUES)
    body["max_completion_tokens"] = 1  # quick
    response = served.http.post(
        path, content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)
    assert served.server.driver.failure is None
