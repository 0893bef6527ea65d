import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import jkvq
from jkvq.cli.engine.chat import _answer as _answer_line
from jkvq.cli.engine.conversation import Conversation
from jkvq.cli.engine.interrupts import heeded
from jkvq.cli.main import app
from jkvq.models.formats.converted_folder import write_converted
from tests.cli.running import run
from tests.tiny import CONFIG

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    "{% if messages[-1]['content'] == 'refuse' %}{{ raise_exception('not that') }}{% endif %}"
)
LONG = "A long message. " * 18  # more than a chunk of 256 tokens


@pytest.fixture(scope="module")
def chat_model(tiny, tmp_path_factory) -> str:
    """The folder of the tiny model with a chat template."""
    backend = tiny.tokenizer.hf.backend_tokenizer
    hf = type(tiny.tokenizer.hf)(
        tokenizer_object=backend, eos_token="<end>", chat_template=TEMPLATE
    )
    path = tmp_path_factory.mktemp("chat") / "tiny"
    tokenizer = dataclasses.replace(tiny.tokenizer, hf=hf)
    write_converted(path, CONFIG, tiny.params, tokenizer)
    return str(path)


@pytest.fixture(scope="module")
def chatting(chat_model) -> jkvq.LLM:
    return jkvq.load(chat_model, cache="bf16")


def _conversation(llm: jkvq.LLM, **options: Any) -> Conversation:
    asked = jkvq.Options(**{"max_new_tokens": 6, "ignore_eos": True, **options})
    return Conversation(jkvq.Engine(llm, slots=1), asked)


def _answer(conversation: Conversation, text: str) -> str:
    return "".join(conversation.answer(text, threading.Event()))


def test_lines_are_answered_and_commands_obeyed(chat_model):
    lines = ["Hi", "/stats", "/cache", "/stat", "", LONG, "And?", "/stats", "/reset", "/stats"]
    given = ("chat", "--model", chat_model, "--cache", "bf16", "-n", "4", "--temperature", "0")
    done = CliRunner().invoke(app, given, input="\n".join([*lines, "/help", "/exit", "Unheard"]))
    assert done.exit_code == 0, done.output
    answered, _ = done.stdout.split("This conversation", 1)
    assert answered.count("\n") >= 1
    cached = re.findall(r"cached tokens of the last turn\W+(\d+)", done.stdout)
    assert cached == ["0", "256"]
    said = re.findall(r"tokens of the conversation\W+(\d+)", done.stdout)
    assert [int(each) > 0 for each in said] == [True, True, False]
    assert "times smaller than bf16 │ 1.00" in done.stdout
    assert "/reset │ forget the conversation" in done.stdout
    assert "jkvq: there is no command /stat: did you mean /stats" in done.stderr


def test_a_turn_has_what_was_said_before_and_reads_it_from_the_cache(chatting):
    conversation = _conversation(chatting)
    first = _answer(conversation, LONG)
    assert conversation.last is not None and conversation.last.cached_tokens == 0
    second = _answer(conversation, "More")
    assert conversation.last.cached_tokens == 256
    said = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "More"},
    ]
    assert jkvq.generate(chatting, said, max_new_tokens=6, ignore_eos=True).text == second
    conversation.reset()
    assert (conversation.tokens, conversation.last) == (0, None)


def test_an_answer_that_is_ended_stays_and_the_conversation_goes_on(chatting):
    conversation = _conversation(chatting, max_new_tokens=40)
    stop, pieces = threading.Event(), []
    for piece in conversation.answer("Hi", stop):
        pieces.append(piece)
        stop.set()
    ended = conversation.last
    assert ended is not None and ended.finish_reason == "cancelled" and len(ended.tokens) < 40
    assert ended.text == "".join(pieces)
    for _ in conversation.answer("Go on", threading.Event()):
        pass
    assert conversation.last is not None and conversation.last.finish_reason == "length"
    assert conversation.last.prompt_tokens > ended.prompt_tokens + len(ended.tokens)


def test_a_message_that_is_ended_before_its_answer_is_left_out(chatting):
    conversation, stop = _conversation(chatting), threading.Event()
    stop.set()
    assert list(conversation.answer("Hi", stop)) == []
    assert conversation.last is None


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("x" * 1100, r"would have 1,1\d\d tokens .* context is 1,024: say less, or /reset"),
        ("refuse", "the model's chat template refuses this message: not that"),
        ("caf\udce9", "no valid Unicode at character 3"),
    ],
)
def test_a_message_that_is_refused_leaves_the_conversation_as_it_was(chatting, message, sentence):
    conversation = _conversation(chatting)
    _answer(conversation, "Hi")
    before = conversation.last
    with pytest.raises(jkvq.UserError, match=sentence):
        _answer(conversation, message)
    assert conversation.last is before


def test_a_full_context_and_refusals_are_said_and_the_chat_goes_on(chat_model):
    given = ("chat", "--model", chat_model, "--cache", "bf16", "-n", "4", "--temperature", "0")
    done = CliRunner().invoke(
        app, given, input=b"x" * 1100 + b"\ncaf\xe9\n" + b"x" * 1004 + b"\nHi\n/reset\nHi\n"
    )
    assert done.exit_code == 0, done.output
    said = [line for line in done.stderr.splitlines() if not line.endswith("...")]
    assert len(said) >= 4
    assert "say less, or /reset" in said[0]
    assert "no valid Unicode" in said[1]
    assert said[2] == "The model's context is full: /reset begins a new conversation."
    assert "say less, or /reset" in said[3]


class Interrupted:
    """A conversation whose answer meets Ctrl-C."""

    full, last = False, None

    def answer(self, text: str, stop: threading.Event) -> Iterator[str]:
        yield "Once upon"
        assert heeded()
        assert stop.is_set()
        assert not heeded()  # the next one ends the program
        yield " a"


def test_ctrl_c_ends_the_answer_and_the_next_one_the_program(capsys):
    _answer_line(cast("Conversation", Interrupted()), "Tell me")
    written = capsys.readouterr()
    assert written.out == "Once upon a\n"
    assert written.err == "The answer was ended.\n"
    assert not heeded()


def test_a_model_without_a_chat_template_is_refused_before_its_weights_are_read(model, monkeypatch):
    monkeypatch.setattr("jkvq.loading.load.load", None)
    with pytest.raises(jkvq.UserError, match="has no chat template: choose a model that was made"):
        run("chat", "--model", model)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["-n", "0"], "max_new_tokens=0: a whole number, 1 or more"),
        (["--temperature", "nan"], "temperature=nan: "),
        (["--cache", "bf15"], "cache 'bf15' is not known"),
        (["--dtype", "float23"], "dtype 'float23' is not known"),
        (["--implementation", "cuda"], "implementation 'cuda' is not known"),
        (["--memory", "2"], "memory=2.0: the part of the free memory to take, 0.01 to 1"),
    ],
)
def test_options_are_refused_before_a_model_is_opened(monkeypatch, option, sentence):
    monkeypatch.setattr("jkvq.models.formats.checkpoint.open_checkpoint", None)
    with pytest.raises(jkvq.UserError, match=sentence):
        run("chat", *option)
