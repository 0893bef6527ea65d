"""Whatever a body holds, it gets an answer or an error in OpenAI's form, and the server goes on."""

from scripts.server.fuzz import GOOD, Fuzzer


def test_no_body_is_answered_with_a_failure(served):
    fuzzer = Fuzzer(served.address)
    fuzzer.run(150)  # scripts/server/fuzz.py sends 10,000
    assert fuzzer.answers.total() >= 150
    answered = {path for path, status in fuzzer.answers if status == 200}
    assert answered == set(GOOD)
    assert served.server.driver.failure is None
