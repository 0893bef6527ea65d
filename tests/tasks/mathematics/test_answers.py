import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jkvq.support.errors import UserError
from jkvq.tasks.mathematics import answers as math_answers
from jkvq.tasks.mathematics.answers import equal, given_answer

COLUMN = r"\begin{pmatrix} %s \\ %s \end{pmatrix}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So it is \boxed{18}.", "18"),
        (r"First \boxed{17}, no, \boxed{18}; or 19?", "18"),
        (r"\boxed{\frac{1}{\sqrt{2}}} and {more}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {18}", "18"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("\\boxed{\n\\text{Evelyn}\n}", r"\text{Evelyn}"),
        (r"\boxed{\boxed{18}}", "18"),
        (r"\boxed{}", ""),
        (r"It is 17, so \boxed{ }", ""),
        (r"It is 17, so \boxed{18", ""),
        (r"\boxed{5} is wrong, it is \boxed{\frac{1}{2", ""),
        (r"It is 17, so \boxed{", ""),
        ("She has 20 - 2 = 18.\n#### 18", "18"),
        ("#### 17\nNo.\n#### 1,800", "1,800"),
        ("The answer is 18 dollars, for 9 eggs.", "18"),
        ("The final answer is: **$18**.", "$18"),
        ("The Answer is:\n18\nfor 9 eggs", "18"),
        ("The answer is -3.5.", "-3.5"),
        ("The answer is (3, 4).", "(3, 4)"),
        ("the answer is 3/4 of the cake", "3/4"),
        (r"The answer is $\frac{1}{2}$ of the cake.", r"\frac{1}{2}"),
        (r"The answer is \(x = 5\), as 2 + 3 = 5.", "x = 5"),
        (r"The answer is \[ 5 \] in all.", "5"),
        (r"The answer is \frac{3}{4}.", r"\frac{3}{4}"),
        ("The answer is Evelyn.", "Evelyn"),
        ("He paid $9 and then $1,018.50 in 2 weeks or", "2"),
        ("He paid $9 and then $1,018.50.", "1,018.50"),
        ("It sank by -$5.", "-5"),
        ("It is 20-2", "2"),
        ("Half of it, 1/2", "1/2"),
        ("A half is .5", ".5"),
        ("Take 1,2,3", "3"),
        ("about 50%", "50"),
        ("I cannot answer this question.", ""),
        ("The answer is", ""),
        ("####", ""),
        ("", ""),
    ],
)
def test_which_answer_a_text_gives(text, answer):
    assert given_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *(("18 dollars", "18"), ("$18", "18"), (r"\$18", "18"), ("18.00", "18"), ("18.", "18")),
        *((r"18\text{ cm}", "18"), ("18 cm", "18"), (r"\text{18 dollars}", "18"), ("$18$", "18")),
        *(("70 miles per hour", "70"), ("15", r"15\mbox{ cm}^2"), ("5.4", r"5.4 \text{ cents}")),
        *(("1,080", "1080"), ("10080", r"10,\!080"), (r"\$32,348", r"\$32,\!348")),
        *((r"\frac{1}{2}", "0.5"), ("1/2", "0.5"), ("0.5", r"\frac12"), (r"\dfrac{1}{2}", "1/2")),
        *((r"50\%", "50"), (r"50\%", "0.5"), ("50%", "50")),
        *((r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"), (r"\left(1,2\right)", "(1, 2)")),
        *((r"\left(3, 4\right]", "(3,4]"), (r"(2,\infty)", r"\left(2, \infty\right)")),
        *((r"(3,\infty) \cup (-\infty,2)", r"(-\infty, 2) \cup (3, \infty)"),),
        *((r"\frac{9}{5}", r"1\frac{4}{5}"), ("137.5", r"137 \frac{1}{2}")),
        *(("-4.0", "-4"), (r"-\frac{1}{2}", "-0.5"), (r"\frac{-1}{2}", r"-\frac{1}{2}")),
        *(("90", r"90^\circ"), (r"90\text{ degrees}", r"90^\circ"), ("90°", r"90^{\circ}")),
        *(("Evelyn", r"\text{Evelyn}"), (r"\textbf{Evelyn}", r"\text{Evelyn}"), ("Yes", "yes")),
        *(("C", r"\text{(C)}"), ("(C)", r"\text{(C)}"), (r"\textbf{(E)}", r"\text{E}")),
        *(("7, 5, 3", "3, 5, 7"), (r"\{7, 3, 5\}", "3,5,7"), (r"\{2, 1\}", r"\{1, 2\}")),
        *((r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),),
        *((COLUMN % (r"-\frac{1}{3}", "2"), COLUMN % ("-1/3", "2")),),
        *((r"\begin{bmatrix} 1 & 2 \end{bmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),),
        *(("x = 5", "5"), ("5", "x=5"), ("y=3+2x", "y = 2x + 3"), ("[-2,7]", r"x \in [-2,7]")),
        *(("25", "025"), ("(b+2)(a+5)", "(a+5)(b+2)"), (r"6.72 \times 10^{-5}", ".0000672")),
        *((r"\frac{\cos x}{\sin x}", r"\cot x"), ("-5i+6", "6 - 5i"), (r"11\sqrt2", r"11\sqrt{2}")),
    ],
)  # fmt: skip
def test_answers_that_are_equal(answer, gold):
    assert equal(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        *(("17", "18"), ("1 8", "18"), ("-18", "18"), ("18.01", "18"), ("18x", "18")),
        *(("17 dollars", "18"), ("18 or 19", "18"), ("17, 18", "18"), ("(18, 1)", "18")),
        *(("0.33", r"\frac{1}{3}"), ("0.5", "50"), (r"\frac{4}{5}", r"1\frac{4}{5}")),
        *(("(3,4)", "(3,4]"), ("[3,4]", "(3,4]"), ("(2,1)", "(1,2)"), ("3, 5", "3, 5, 7")),
        *(("Evan", r"\text{Evelyn}"), ("B", r"\text{(C)}"), ("x=4", "x=5"), ("q - p", "p - q")),
        *((COLUMN % (2, 1), COLUMN % (1, 2)), (r"\sqrt{5}", r"2\sqrt{5}"), (r"\infty", "18")),
        *(("", "18"), ("", "0"), ("I cannot answer", "18"), (r"\text{none}", "0"), ("18", "")),
        *((r"\frac{1}{", "18"), (r"\left(", "18"), ("\0", "18"), ("\udc80", "18"), ("#", "18")),
        *(("__import__('os')._exit(0)", "18"), ("9" * 5000, "18"), ("\n", "18"), ("]]}", "18")),
    ],
)  # fmt: skip
def test_answers_that_are_not_equal(answer, gold):
    assert not equal(answer, gold)


def test_monstrous_answers_end_and_the_next_is_compared(monkeypatch):
    monkeypatch.setattr(math_answers, "_CPU_SECONDS", 0.5)
    monkeypatch.setattr(math_answers, "_comparer", math_answers._Comparer())
    start = time.monotonic()
    assert not equal("9^{9^{9^9}}", "18")
    assert not equal("(" * 3000 + "1" + ")" * 3000, "18")
    assert time.monotonic() - start < 30
    assert equal("18.0", "18")


def test_answers_are_compared_from_any_thread():
    pairs = [(f"{number}.0", str(number - number % 2)) for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda pair: equal(*pair), pairs)) == [True, False] * 10


def test_math_verify_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(math_answers, "_comparer", math_answers._Comparer())
    with pytest.raises(UserError, match=r"math-verify.*pip install 'jkvq\[eval\]'"):
        equal("18.0", "18")


def test_a_reply_that_was_not_waited_for_is_not_taken_for_the_next(monkeypatch):
    def interrupted(process, line):
        told(process, line)
        raise KeyboardInterrupt

    told = math_answers._told
    assert equal("18.0", "18")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(math_answers, "_told", interrupted)
        equal("18.0", "18")
    assert not equal("17.0", "18")
