"""From prompts to text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from jkvq.engine.capacity import call_limits
from jkvq.engine.drawing.fit import require_fit
from jkvq.engine.engine import Engine, Handle, require_llm
from jkvq.engine.options import Options, options_by_prompt
from jkvq.engine.prompt import Prompt, as_batch, encode_prompt
from jkvq.engine.writer import Generation
from jkvq.llm import LLM
from jkvq.support.errors import UserError
from jkvq.support.progress import note


@dataclass(frozen=True)
class Piece:
    """New text of one prompt of a stream; the last one brings the whole `Generation`."""

    index: int  # which prompt
    text: str
    generation: Generation | None = None


_Asked = Options | Sequence[Options] | None


@overload
def generate(
    llm: LLM,
    prompts: str | list[int] | list[dict[str, str]],
    options: _Asked = None,
    **changes: Any,
) -> Generation: ...
@overload
def generate(
    llm: LLM,
    prompts: list[str] | list[list[int]] | list[list[dict[str, str]]],
    options: _Asked = None,
    **changes: Any,
) -> list[Generation]: ...
@overload
def generate(
    llm: LLM, prompts: Sequence[Any], options: _Asked = None, **changes: Any
) -> Generation | list[Generation]: ...
def generate(
    llm: LLM, prompts, options: _Asked = None, **changes: Any
) -> Generation | list[Generation]:
    """Writes on from each prompt.

    Args:
        llm: from `jkvq.load`.
        prompts: text, a conversation (messages with role and content) or tokens; or a list of
            these, which run together as one batch.
        options: for all prompts, or a list with one for each; None is `jkvq.Options()`.
        **changes: fields of `jkvq.Options` that take the place of theirs, such as
            max_new_tokens=64 or temperature=0.7; seed may be a list, one for each prompt.

    Returns:
        A `Generation`, or a list of them for a list of prompts. A prompt of a list that fails has
        an ``error``; a single one raises it.
    """
    batch, single = as_batch(prompts)
    asked = options_by_prompt(options, changes, len(batch))
    results = [handle.result() for handle in _submitted(llm, batch, asked)]
    if not single:
        return results
    if results[0].error is not None:
        raise UserError(results[0].error)
    return results[0]


def stream(
    llm: LLM, prompts: Prompt | Sequence[Prompt], options: _Asked = None, **changes: Any
) -> Iterator[Piece]:
    """Like `generate`, but gives each prompt's text in pieces, as it is written."""
    batch, _ = as_batch(prompts)
    handles = _submitted(llm, batch, options_by_prompt(options, changes, len(batch)))
    return _pieces(handles)  # all that can be refused has been


def _pieces(handles: list[Handle]) -> Iterator[Piece]:
    for handle in handles:
        handle.watched = True
    going = dict(enumerate(handles))
    while going:
        handles[0].engine.step()
        for index, handle in list(going.items()):
            text, ended = handle.writer.new_text(), handle.done
            if ended:
                del going[index]
            if text or ended:
                yield Piece(index, text, handle.result() if ended else None)


def _submitted(llm: LLM, prompts: Sequence[Prompt], options: list[Options]) -> list[Handle]:
    """The prompts in an engine of their own, with room for all of them and their answers."""
    require_llm(llm)
    tokens = [
        encode_prompt(llm, prompt, each.chat, each.answer_start)
        for prompt, each in zip(prompts, options, strict=True)
    ]
    for each in options:
        require_fit(llm, each)
    budgets = _budgets(llm.config.context, tokens, options)
    lengths = [len(row) + budget for row, budget in zip(tokens, budgets, strict=True)]
    engine = Engine.of(llm, call_limits(llm, lengths))
    return [
        engine.submit_tokens(row, each, f"prompt {index}")
        for index, (row, each) in enumerate(zip(tokens, options, strict=True))
    ]


def _budgets(context: int, tokens: list[list[int]], options: list[Options]) -> list[int]:
    """How many tokens each prompt may get; says where that is fewer than asked for."""
    asked = [each.max_new_tokens for each in options]
    budgets = [min(most, context - len(row)) for row, most in zip(tokens, asked, strict=True)]
    cut = [index for index, budget in enumerate(budgets) if budget < asked[index]]
    if cut:
        first = min(cut, key=budgets.__getitem__)
        which = "the text" if len(tokens) == 1 else f"{len(cut)} of {len(tokens)} texts, the first"
        note(
            f"max_new_tokens={asked[first]:,}: the model's context of {context:,} tokens ends "
            f"{which} after {budgets[first]:,}"
        )
    return budgets
