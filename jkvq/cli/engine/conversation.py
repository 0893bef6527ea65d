"""A conversation over one engine: what was said, and what it takes."""

import threading
from collections.abc import Iterator

from jinja2 import TemplateError

from jkvq.cache.footprint import bits_per_element, sequence_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec, spec_text
from jkvq.defaults import PLAIN_CACHE
from jkvq.engine.engine import Engine
from jkvq.engine.options import Options
from jkvq.engine.prompt import as_batch
from jkvq.engine.writer import Generation
from jkvq.models.tokenizer import Message
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes

Row = tuple[str, ...]


class Conversation:
    """Messages of a user and a model, each answered through an engine that keeps what it stores.

    last: what came of the newest message; None before the first.
    """

    def __init__(self, engine: Engine, options: Options, system: str | None = None):
        self._engine, self._options = engine, options
        self._system: list[Message] = []
        if system is not None:
            self._system = [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forgets what was said; what the engine has stored of it goes when room is needed."""
        self._messages = self._system
        self.last: Generation | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.last is None else self.last.prompt_tokens + len(self.last.tokens)

    @property
    def full(self) -> bool:
        return self.tokens >= self._engine.llm.config.context

    def answer(self, text: str, stop: threading.Event) -> Iterator[str]:
        """The answer to a message, in pieces; ``stop`` ends it with what there is.

        A message that is refused or has no answer is not part of the conversation.
        """
        asked: list[Message] = [*self._messages, {"role": "user", "content": text}]
        handle = self._engine.submit(self._encoded(asked), self._options)
        handle.watched = True
        while not handle.done:
            if stop.is_set():
                handle.cancel()
            else:
                self._engine.step()
            if piece := handle.writer.new_text():
                yield piece
        result = handle.result()
        if result.error is not None:
            raise UserError(result.error)
        if result.tokens:
            self._messages = [*asked, {"role": "assistant", "content": result.text}]
            self.last = result

    def _encoded(self, messages: list[Message]) -> list[int]:
        llm = self._engine.llm
        as_batch(messages)  # refuses what is no text
        try:
            tokens = llm.tokenizer.encode_chat(messages)
        except TemplateError as error:
            raise UserError(f"the model's chat template refuses this message: {error}") from None
        if len(tokens) >= llm.config.context:
            raise UserError(
                f"the conversation would have {len(tokens):,} tokens with this message, which is "
                f"left out, and the model's context is {llm.config.context:,}: say less, or /reset"
            )
        return tokens

    def cache_rows(self) -> tuple[Row, list[Row]]:
        """A table of what the cache takes: now, and of a full context."""
        llm = self._engine.llm
        spec, plain, shape = llm.spec, parse_spec(PLAIN_CACHE), CacheShape.of(llm.config)
        lengths = {"full": llm.config.context}
        if self.tokens:
            lengths = {"now": min(self.tokens, llm.config.context), **lengths}
        own = [sequence_bytes(spec, shape, tokens) for tokens in lengths.values()]
        others = [sequence_bytes(plain, shape, tokens) for tokens in lengths.values()]
        bits = [bits_per_element(spec, shape, tokens) for tokens in lengths.values()]
        header = [f"{name}: {tokens:,} tokens" for name, tokens in lengths.items()]
        ratios = [f"{other / size:.2f}" for size, other in zip(own, others, strict=True)]
        return (spec_text(spec), *header), [
            ("bits per element", *(f"{each:.2f}" for each in bits)),
            ("memory", *map(format_bytes, own)),
            (f"memory in {PLAIN_CACHE}", *map(format_bytes, others)),
            (f"times smaller than {PLAIN_CACHE}", *ratios),
        ]

    def stats_rows(self) -> list[Row]:
        """A table of what was said and how fast."""
        stats = self._engine.stats
        rows = [("tokens of the conversation", f"{self.tokens:,}")]
        if self.last is not None:
            timings, prompt = self.last.timings, self.last.prompt_tokens
            cached, later = self.last.cached_tokens, len(self.last.tokens) - 1
            rows += [
                ("cached tokens of the last turn", f"{cached:,}"),
                ("prefilled tokens of the last turn", f"{prompt - cached:,}"),
                ("time to its first token", f"{1000 * timings.prefill:,.0f} ms"),
            ]
            if later > 0:
                rows.append(("tokens/s after that", f"{later / timings.decode:,.1f}"))
        rows += [
            ("pages in use", "{:,} of {:,}".format(*stats.pages)),
            ("pages of windows in use", "{:,} of {:,}".format(*stats.exact_pages)),
        ]
        if stats.local_pages[1]:
            in_use = "{:,} of {:,}".format(*stats.local_pages)
            rows.append(("pages of layers with a window in use", in_use))
        return rows
