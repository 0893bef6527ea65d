"""The page, in a real browser where there is one."""

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from tests.server.conftest import Running, running

expect.set_options(timeout=60_000)  # something may have to be compiled


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        own = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            found = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"there is no browser: {error.message.splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def page(browser) -> Iterator[Page]:
    opened = browser.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console",
        lambda line: (
            line.type == "error"
            and "the server responded with" not in line.text
            and problems.append(line.text)
        ),
    )
    yield opened
    opened.close()
    assert problems == []


def ask(page: Page, text: str, tokens: int, *, wait: bool = True) -> None:
    """Asks by the keyboard, and waits until the answer is whole."""
    page.locator("#temperature").fill("0")
    page.locator("#tokens").fill(str(tokens))
    page.locator("#text").focus()
    answers = page.locator(".message.assistant")
    before = answers.count()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(before + 1)
    if wait:
        expect(answers.last.locator(".faint")).to_contain_text("tokens")


def test_a_chat_is_answered_and_the_figures_move(page, served: Running):
    page.goto(served.address)
    expect(page.locator("#what")).to_have_text("tiny with f32,page=8")
    expect(page.locator("#state")).to_have_text("serving")
    drawn = served.figure("jkvq_drawn_tokens_total")
    ask(page, "Hello", tokens=2)  # compiles
    ask(page, "Hello", tokens=300, wait=False)
    expect(page.locator("#batch")).to_have_text("1 of 4")
    expect(page.locator("#packed")).not_to_have_text(re.compile("^0 of"))
    expect(page.locator("#ours-size")).not_to_have_text("0 B")
    answer = page.locator(".message.assistant").last
    expect(answer.locator("span").first).not_to_be_empty()
    expect(answer.locator(".faint")).to_contain_text("300 tokens")
    assert served.figure("jkvq_drawn_tokens_total") == drawn + 302
    expect(page.locator("#rate")).to_have_text(re.compile("[1-9]"))
    expect(page.locator("#batch")).to_have_text("0 of 4")
    expect(page.locator("#rates polyline")).to_have_attribute("points", re.compile(r"\S+ \S+"))
    assert page.locator(".message.user").last.text_content() == "Hello"


def test_a_conversation_goes_on_and_is_sent_whole(page, served: Running):
    page.goto(served.address)
    ask(page, "<b>One</b>", tokens=20)
    answer = page.locator(".message.assistant span").first.text_content()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Two", tokens=2)
    one, two, three = sent.value.post_data_json["messages"]
    assert [one, three] == [
        {"role": "user", "content": "<b>One</b>"},
        {"role": "user", "content": "Two"},
    ]
    assert answer and two == {"role": "assistant", "content": answer}
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)


def test_escape_stops_an_answer(page, served: Running):
    page.goto(served.address)
    ask(page, "Hello", tokens=900, wait=False)
    served.wait_until("jkvq_running", 1)
    page.keyboard.press("Escape")
    expect(page.locator(".message.assistant .faint")).to_have_text("stopped")
    served.wait_until("jkvq_running", 0)
    expect(page.locator("#text")).to_be_focused()


def test_what_the_server_refuses_is_said(page, served: Running):
    page.goto(served.address)
    ask(page, "Hello", tokens=0, wait=False)
    expect(page.locator(".error")).to_contain_text("max_tokens=0: ")


def test_with_a_key_the_page_asks_for_it(page, chatty):
    with running(chatty, key="secret") as locked:
        for path in ("/", "/page.js", "/page.css", "/chat.js", "/watch.js"):
            answer = locked.http.get(path)
            assert answer.status_code == 200 and "tiny" not in answer.text
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        page.goto(locked.address)
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#door-note")).to_contain_text("not the key")
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_text("serving")
        ask(page, "Hello", tokens=2)
        page.goto("about:blank")  # it asks no more when the server ends


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(page, served: Running, width):
    page.set_viewport_size({"width": width, "height": 740})
    page.goto(served.address)
    expect(page.locator("#state")).to_have_text("serving")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        "[...document.querySelectorAll('.card, #ask, header')]"
        f".filter(e => e.getBoundingClientRect().right > {width} || e.scrollWidth > e.clientWidth)"
        ".map(e => e.textContent)"
    )
    assert wide == []
