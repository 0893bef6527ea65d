"""Whether a model can do what options ask for."""

from jkvq.engine.drawing.grammar import require_grammar
from jkvq.engine.options import Options
from jkvq.llm import LLM
from jkvq.support.errors import UserError


def require_fit(llm: LLM, options: Options) -> None:
    """Refuses options that this model cannot have."""
    for name in ("stop_tokens", "logit_bias"):
        for token in getattr(options, name):
            if token >= llm.config.vocab:
                raise UserError(
                    f"{name}: token {token} is outside the vocabulary of {llm.config.vocab} tokens"
                )
    if options.grammar is not None:
        require_grammar(llm.tokenizer, llm.config.vocab, options.grammar)


def stop_tokens(llm: LLM, options: Options) -> frozenset[int]:
    """The tokens that end a text, the model's own among them."""
    own = frozenset() if options.ignore_eos else llm.tokenizer.stop_tokens
    return frozenset({*options.stop_tokens, *own})
