"""Who may ask, how much, and what happens when either side goes away."""

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import openai
import pytest

import jkvq
from jkvq.server.server import Server, bind
from tests.server.conftest import running

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Hello", "max_tokens": 900, "temperature": 0}  # takes seconds
SHORT = {"prompt": "Hello", "max_tokens": 2}


def test_a_connection_lives_on_while_its_client_would_use_it_again(served):
    connection = HTTPConnection(served.address.removeprefix("http://"))
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    used = connection.sock
    time.sleep(6)  # httpx keeps one for 5 seconds, aiohttp for 15
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200 and connection.sock is used
    connection.close()


@pytest.mark.parametrize("key", [None, "wrong", "secre", "secret2"])
def test_without_the_key_nothing_is_reachable_but_health(locked, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert locked.http.get("/health", headers=headers).json() == {"status": "ok"}
    paths = [("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/ready")]
    for method, path in [*paths, ("GET", "/openapi.json"), ("GET", "/nope"), ("GET", "/health/")]:
        response = locked.http.request(method, path, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["WWW-Authenticate"] == "Bearer"


def test_with_the_key_all_is(locked):
    assert [model.id for model in locked.client("secret").models.list()] == ["tiny"]
    with pytest.raises(openai.AuthenticationError):
        locked.client("wrong").models.list()
    headers = {"Authorization": "Bearer secret"}
    assert locked.http.get("/ready", headers=headers).json() == {"status": "ready"}


@pytest.fixture(scope="module")
def locked(chatty):
    with running(chatty, key="secret") as found:
        yield found


def test_no_text_of_a_request_is_in_the_log(served, caplog):
    with caplog.at_level(logging.DEBUG, "jkvq"):
        served.http.post(COMPLETIONS, json={**SHORT, "prompt": "Xyzzy"})
        served.http.post(COMPLETIONS, json={**SHORT, "temperature": "Xyzzy"})
        served.http.get("/Xyzzy?Xyzzy=1")
        served.http.get("/health")
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [(line["path"], line["status"]) for line in lines] == [
        (COMPLETIONS, 200),
        (COMPLETIONS, 400),
        (None, 404),
    ]
    assert "Xyzzy" not in caplog.text
    assert all(0 < line["seconds"] < 60 for line in lines)


def test_whoever_comes_when_all_places_are_taken_is_told_to_come_again(chatty):
    with running(chatty, slots=1, max_queue=1) as served, ThreadPoolExecutor(2) as pool:
        body = {**LONG, "max_tokens": 250}
        going = [pool.submit(served.http.post, COMPLETIONS, json=body) for _ in range(2)]
        served.wait_until("jkvq_waiting", 1)
        refused = served.http.post(COMPLETIONS, json=SHORT)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert "2 texts are running or waiting" in refused.json()["error"]["message"]
        many = served.http.post(COMPLETIONS, json={"prompt": ["a"] * 500, "n": 128})
        assert "asks for 64000 texts" in many.json()["error"]["message"]
        never = served.http.post(COMPLETIONS, json={**SHORT, "n": 3})
        assert never.status_code == 400
        assert "asks for 3 texts, and the server takes 2" in never.json()["error"]["message"]
        texts = {each.result().json()["choices"][0]["text"] for each in going}
        assert len(texts) == 1  # those that were there are not touched
        assert served.http.post(COMPLETIONS, json=SHORT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_pages_at_once(served, stream):
    drawn = served.figure("jkvq_drawn_tokens_total")
    ended = 'jkvq_texts_total{finish_reason="cancelled"}'
    before = served.figure(ended)
    body = json.dumps({**LONG, "stream": stream, "n": 6})  # more than there are slots
    connection = HTTPConnection(served.address.removeprefix("http://"))
    connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
    served.wait_until("jkvq_running", 4)
    assert served.figure("jkvq_waiting") == 2
    assert served.figure('jkvq_pages_used{pool="packed"}') > 0
    connection.close()
    served.wait_until("jkvq_running", 0)
    assert served.figure("jkvq_waiting") == 0
    assert served.figure('jkvq_pages_used{pool="packed"}') == 0
    assert served.figure("jkvq_drawn_tokens_total") - drawn < 6 * 900
    assert served.figure(ended) == before + 6


def test_a_server_that_ends_lets_requests_end_and_takes_no_more(chatty):
    (expected,) = jkvq.generate(chatty, ["Hello"], max_new_tokens=150, chat=False)
    with running(chatty) as served:
        stream = served.client().completions.create(
            model="tiny", prompt="Hello", max_tokens=150, temperature=0, stream=True
        )
        text = next(stream).choices[0].text
        served.server.end()
        while served.http.get("/ready").status_code != 503:
            time.sleep(0.01)
        refused = served.http.post(COMPLETIONS, json=SHORT)
        assert refused.status_code == 503
        assert "the server is ending" in refused.json()["error"]["message"]
        assert served.http.get("/health").status_code == 200
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == expected.text


def test_requests_that_take_longer_are_ended_with_an_error(chatty):
    with running(chatty, drain=0.2) as served:
        stream = served.client().completions.create(
            model="tiny", prompt="Hello", max_tokens=900, temperature=0, stream=True
        )
        next(stream)
        served.server.end()
        with pytest.raises(openai.APIError, match="the server is ending"):
            list(stream)


def test_an_address_that_is_taken_is_refused():
    with bind("127.0.0.1", 0) as place:
        port = place.getsockname()[1]
        place.listen()
        with pytest.raises(
            jkvq.UserError, match=f"127.0.0.1, port {port}, cannot be served: .*in use"
        ):
            bind("127.0.0.1", port)
    with pytest.raises(jkvq.UserError, match=r"port=70000: 0 .* to 65535"):
        bind("127.0.0.1", 70000)
    with pytest.raises(jkvq.UserError, match=r"no\.such\.host\.invalid, port 1, cannot be served"):
        bind("no.such.host.invalid", 1)


def test_a_server_that_is_warm_compiles_nothing_for_its_first_request(chatty):
    with bind("127.0.0.1", 0) as place:
        server = Server(chatty, place, name="tiny", slots=3)  # nobody else has programs for 3
        server.warm_up()
    engine = server.driver.engine
    assert engine.stats.pages[0] == engine.stats.running == 0
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 5, "temperature": temperature}
        timings = engine.submit("Hello", **options).result().timings
        assert timings.compile == timings.fetch == 0
