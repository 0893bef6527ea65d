"""From the body of a request to what the engine runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from jkvq.engine.drawing.fit import require_fit
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options, own_seed
from jkvq.engine.prompt import Prompt, as_batch, encode_prompt, strangers_prompt
from jkvq.models.tokenizer import Tokenizer
from jkvq.openai.body import Form, read_body
from jkvq.openai.logprobs import Echo, echo_of
from jkvq.openai.tools import FIELDS, Tools, read_tools
from jkvq.server.bodies import ChatBody, CompletionBody, as_sent
from jkvq.support.errors import UserError

# What is looked at here
_OWN = ("n", "stream", "stream_options", "logprobs")
_OWN_OF: dict[Form, tuple[str, ...]] = {
    "chat": ("top_logprobs", *FIELDS),
    "completion": ("echo",),
}
_COMPLETION_TOKENS = 16  # OpenAI's, of those who do not say


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    prompts: ``n`` texts of each.
    options: of all texts; their seeds are those that `jkvq.generate` would give a list.
    limit: tokens of each answer; None is as many as there is room for.
    usage: a stream ends with the number of tokens.
    echo: the prompt is the beginning of the answer.
    tools: what the answer may call.
    """

    form: Form
    prompts: Sequence[Prompt]
    options: Options
    limit: int | None
    n: int
    stream: bool
    usage: bool
    logprobs: bool
    echo: bool
    tools: Tools | None

    @property
    def texts(self) -> int:
        return len(self.prompts) * self.n

    def encoded(self, engine: Engine) -> list[tuple[list[int], Options]]:
        """The prompt of each text as tokens, with its options; refuses what can never run."""
        require_fit(engine.llm, self.options)
        tools = self.tools.listed if self.tools else ()
        found = []
        for prompt in self.prompts:
            with strangers_prompt():
                tokens = encode_prompt(engine.llm, prompt, self.options.chat, tools=tools)
            budget = engine.budget(len(tokens), self.limit or None)
            budget = 0 if self.limit == 0 else budget
            for _ in range(self.n):
                seed = own_seed(self.options.seed, len(found))
                found.append((tokens, self.options.but(max_new_tokens=budget, seed=seed)))
        return found

    def echoes(
        self, encoded: Sequence[tuple[list[int], Options]], tokenizer: Tokenizer
    ) -> list[Echo]:
        """What each text begins with: its prompt, as it was sent, if that is asked for."""
        if not self.echo:
            return [Echo()] * self.texts
        echoes = []
        for prompt, (tokens, _) in zip(self.prompts, encoded[:: self.n], strict=True):
            text = prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
            echo = echo_of(tokenizer, text, tokens) if self.logprobs else Echo(text)
            echoes += [echo] * self.n
        return echoes


def read_asked(form: Form, body: ChatBody | CompletionBody) -> Asked:
    """What a body asks for; whatever is not there is refused."""
    sent = as_sent(body)
    prompt, changes = read_body(form, sent, also=(*_OWN, *_OWN_OF[form]))
    prompts, _ = as_batch(prompt)
    limit = changes.pop("max_new_tokens", None if form == "chat" else _COMPLETION_TOKENS)
    n, (logprobs, tops) = body.n or 1, _logprobs(body)
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    if limit == 0 and not echo:
        raise UserError(
            "max_tokens=0: 1 or more, or echo=true too, which asks for the prompt alone"
        )
    changes |= {"top_logprobs": tops, "prompt_logprobs": echo and (logprobs or limit == 0)}
    tools = read_tools(sent) if form == "chat" else None
    if tools is not None:
        if changes.get("grammar") is not None:
            raise UserError("response_format goes without tools: leave one of them out")
        changes["grammar"] = tools.grammar
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    if body.stream_options is not None and not body.stream:
        raise UserError("stream_options goes with stream=true: give both or neither")
    return Asked(
        form, prompts, Options(**changes), limit, n, bool(body.stream), usage, logprobs, echo, tools
    )


def _logprobs(body: ChatBody | CompletionBody) -> tuple[bool, int]:
    """Whether log probabilities are asked for, and of how many of the likeliest tokens."""
    if isinstance(body, CompletionBody):
        return body.logprobs is not None, body.logprobs or 0
    if body.top_logprobs and not body.logprobs:
        raise UserError("top_logprobs goes with logprobs=true: give both or neither")
    return bool(body.logprobs), body.top_logprobs or 0
