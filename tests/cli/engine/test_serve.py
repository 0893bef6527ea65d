import re
import signal
import subprocess
import sys

import httpx
import pytest

import jkvq
from jkvq.cli.engine.serve import _checked_key, served_name
from jkvq.server.server import bind
from tests.cli.running import run
from tests.test_import_time import write_model


def test_it_serves_until_it_is_told_to_end(tmp_path):
    write_model(tmp_path)
    options = ["--model", str(tmp_path), "--cache", "bf16", "--no-check", "--port", "0"]
    code = "from jkvq.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", *options, "--slots", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search("http://[^ ]*/v1", line)))
        body = {"model": tmp_path.name, "prompt": "Hello", "max_tokens": 2}
        found = httpx.post(f"{address}/completions", json=body, timeout=60)
        assert found.json()["usage"]["prompt_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait() == 0
    assert '"path": "/v1/completions", "status": 200' in rest
    assert "Hello" not in rest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--port -1", "port=-1: 0 .any that is free. to 65535"),
        ("--max-queue -1", "max_queue=-1: texts that may wait, 0 or more"),
        ("--slots 0", "slots=0: texts that run at once"),
        ("--memory 2", "memory=2.0: the part of the free memory"),
        ("--drain -1", "drain=-1.0: seconds, 0 to 86400"),
        ("--guard 2", "guard=2.0: the share of texts to run again, 0 to 1"),
        ("--guard-limit -1", "guard_limit=-1.0: a KL in nats"),
        ("--guard 0.1 --cache bf16", "guard looks at what few bits do to texts, and bf16 has 16"),
        ("--api-key é", "the API key is empty or has characters that HTTP cannot carry"),
        ("--api-key=", "the API key is empty or has characters that HTTP cannot carry"),
        ("--cache nope --port 0", "cache 'nope' is not known"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(monkeypatch, arguments, sentence):
    monkeypatch.setattr("jkvq.models.formats.checkpoint._open_named", None)
    with pytest.raises(jkvq.UserError, match=f"^{sentence}"):
        run("serve", *arguments.split())


def test_a_key_is_what_stands_on_its_line():
    assert _checked_key("abc~1!\n") == "abc~1!"
    for key in ("a b", "a\nb", "\x7f", " \n"):
        with pytest.raises(jkvq.UserError, match="the API key is empty or has characters"):
            _checked_key(key)


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("jkvq.models.formats.checkpoint._open_named", None)
    with bind("127.0.0.1", 0) as place:
        place.listen()
        with pytest.raises(jkvq.UserError, match="give another --port"):
            run("serve", "--port", str(place.getsockname()[1]))


def test_what_is_not_installed_is_said(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("jkvq.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(jkvq.UserError, match=r"needs fastapi, .*pip install 'jkvq\[serve\]'"):
        run("serve")


def test_a_model_is_called_by_its_name_and_not_by_its_place(tmp_path, monkeypatch):
    assert served_name("smollm2-135m") == "smollm2-135m"
    assert served_name("org/model") == "org/model"
    assert served_name(str(tmp_path / "..") + "/" + tmp_path.name) == tmp_path.name
    monkeypatch.chdir(tmp_path)
    assert served_name(".") == tmp_path.name
