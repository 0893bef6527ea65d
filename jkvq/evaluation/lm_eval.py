"""A model class for lm-evaluation-harness: a model with its cache answers the harness's requests.

`jkvq.loading.lm_eval` makes it known to the harness as `jkvq`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jkvq.engine.engine import Engine, require_llm
from jkvq.engine.options import Options, mixed_seed
from jkvq.engine.writer import Handle
from jkvq.evaluation.likelihood import Ending, likelihoods
from jkvq.llm import LLM
from jkvq.models.tokenizer import Message
from jkvq.support.arguments import shown, whole
from jkvq.support.errors import UserError
from jkvq.support.progress import count_bar

_NEW_TOKENS = 256  # of an answer, where a task does not say; as the harness's own models
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")

# What was asked in text, where the harness wants it kept; its context and continuation in tokens.
_Pair = tuple[tuple[str, str] | None, list[int], list[int]]


class HarnessLM(TemplateLM):
    """A model with its cache, as lm-evaluation-harness asks it.

    Args:
        llm: from `jkvq.load`.
        max_length: the most tokens that the model reads at once; None is its context. What is
            longer loses its beginning.
    """

    tokenizer: Any  # that of transformers, which the harness knows

    def __init__(self, llm: LLM, *, max_length: int | None = None):
        super().__init__()
        require_llm(llm)
        context = llm.config.context
        allowed = f"from 2 to the model's context of {context} tokens"
        asked = context if max_length is None else max_length
        self.max_length = whole("max_length", asked, 2, context, allowed)
        self.llm, self.tokenizer = llm, llm.tokenizer.hf

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        raise UserError(
            "this model's tokenizer has no token that begins or ends a text (BOS, EOS), which a "
            "task without a context needs: choose other tasks, or name one in the tokenizer's files"
        )

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[Message], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the model's template writes it.

        A template that refuses is asked again without the system message, as the harness's own
        models do: some have no such role.
        """
        if not self.llm.tokenizer.can_chat:
            raise UserError(
                "this model has no chat template: run the harness without --apply_chat_template"
            )

        def written(messages: list[Message]) -> str:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return str(text)

        try:
            return written(chat_history)
        except TemplateError:
            return written([each for each in chat_history if each["role"] != "system"])

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text, with a leading one if the model's texts begin so and this does not."""
        if add_special_tokens is None:
            first = self.tokenizer.bos_token or self.tokenizer.eos_token
            add_special_tokens = not (first and string.startswith(first))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        endings = [self._ending(*request) for request in requests]
        answers: dict[int, tuple[float, bool]] = {}
        with count_bar("Scoring", len(endings)) as bar:
            for place, found in likelihoods(self.llm, endings):
                answers[place] = found.log, found.greedy
                text = requests[place][0]
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, answers[place])
                bar.advance(1)
        return [answers[place] for place in range(len(requests))]

    def _ending(
        self, text: tuple[str, str] | None, context: list[int], continuation: list[int]
    ) -> Ending:
        """What is read and scored for a request; a text that is too long loses its beginning."""
        if not 1 <= len(continuation) <= self.max_length:
            raise UserError(
                f"the continuation {shown(text and text[1])} has {len(continuation)} tokens: "
                f"1 to {self.max_length} can be scored; mend the task or give a longer max_length"
            )
        tokens = (*context, *continuation)[-(self.max_length + 1) :]
        return Ending(tokens[:-1], continuation)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, in windows where they are longer than the context."""
        windows: list[_Pair] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += own
            owners += [place] * len(own)
        totals = [0.0] * len(requests)
        for place, (log, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[place] += log
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, which an engine writes side by side."""
        engine = Engine(self.llm)
        waiting = {
            self._submit(engine, request, place).number: place
            for place, request in enumerate(requests)
        }
        texts = [""] * len(requests)
        with count_bar("Answering", len(requests)) as bar:
            while waiting:
                for handle in engine.step():
                    if not handle.done or handle.number not in waiting:
                        continue
                    place, written = waiting.pop(handle.number), handle.result()
                    if written.error is not None:
                        raise UserError(written.error)
                    texts[place] = written.text
                    self.cache_hook.add_partial(
                        "generate_until", requests[place].args, written.text
                    )
                    bar.advance(1)
        return texts

    def _submit(self, engine: Engine, request: Instance, place: int) -> Handle:
        context, asked = request.arguments
        options = generation_options(asked, place)
        room = self.max_length - options.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks={options.max_new_tokens}: a max_length of {self.max_length} tokens "
                "leaves the prompt no room then; lower it with --gen_kwargs"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return engine.submit(tokens[-room:], options)


def generation_options(asked: dict[str, Any], place: int) -> Options:
    """What the generation arguments of a request mean here.

    Every request has a random stream of its own, made of the seed (0 unless told) and its place.
    """
    given: dict[str, Any] = {**normalize_gen_kwargs(asked, _NEW_TOKENS)}
    stop, most = given.pop("until"), given.pop("max_gen_toks")
    given.pop("do_sample")
    for name in given:
        if name not in _SAMPLING:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *_SAMPLING))
            raise UserError(f"the model jkvq has no generation argument '{name}': known: {known}")
    options = Options(max_new_tokens=most, stop=[each for each in stop if each], **given)
    return dataclasses.replace(options, seed=mixed_seed(options.seed or 0, place))
