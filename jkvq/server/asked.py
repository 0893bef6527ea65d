"""From the body of a request to what the engine runs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jkvq.engine.drawing.fit import require_fit
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options, options_by_prompt
from jkvq.engine.prompt import Prompt, as_batch, encode_prompt, strangers_prompt
from jkvq.openai.body import Form, read_body
from jkvq.server.bodies import ChatBody, CompletionBody, as_sent
from jkvq.support.errors import UserError

_OWN = ("n", "stream", "stream_options", "logprobs")  # what is looked at here
_COMPLETION_TOKENS = 16  # OpenAI's, of those who do not say


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    prompts: ``n`` texts of each.
    options: of each text; their seeds are those that `jkvq.generate` would give a list.
    limit: tokens of each answer; None is as many as there is room for.
    usage: a stream ends with the number of tokens.
    """

    form: Form
    prompts: Sequence[Prompt]
    options: Sequence[Options]
    limit: int | None
    n: int
    stream: bool
    usage: bool
    logprobs: bool

    def encoded(self, engine: Engine) -> list[tuple[list[int], Options]]:
        """The prompt of each text as tokens, with its options; refuses what can never run."""
        found = []
        for first, prompt in enumerate(self.prompts):
            each = self.options[first * self.n : (first + 1) * self.n]
            with strangers_prompt():
                tokens = encode_prompt(engine.llm, prompt, each[0].chat)
            require_fit(engine.llm, each[0])
            budget = engine.budget(len(tokens), self.limit)
            found += [(tokens, dataclasses.replace(one, max_new_tokens=budget)) for one in each]
        return found


def read_asked(form: Form, body: ChatBody | CompletionBody) -> Asked:
    """What a body asks for; whatever is not there is refused."""
    prompt, changes = read_body(form, as_sent(body), also=_OWN)
    prompts, _ = as_batch(prompt)
    limit = changes.pop("max_new_tokens", None if form == "chat" else _COMPLETION_TOKENS)
    n, wanted = body.n or 1, body.logprobs
    if not isinstance(wanted, bool) and wanted:
        raise UserError(
            f"logprobs={wanted}: jkvq has those of the tokens that were drawn; give 0 for these, "
            "or leave it out"
        )
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    if body.stream_options is not None and not body.stream:
        raise UserError("stream_options goes with stream=true: give both or neither")
    options = options_by_prompt(None, changes, len(prompts) * n)
    shown = wanted is True or (wanted == 0 and not isinstance(wanted, bool))
    return Asked(form, prompts, options, limit, n, bool(body.stream), usage, shown)
