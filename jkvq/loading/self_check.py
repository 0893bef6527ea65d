"""The self-check: whether a cache breaks a model, seen on a few hundred tokens and kept.

Measured is the KL of the next token against the 16-bit cache, over tokens that read packed ones. It
is about the logarithm of what the cache multiplies the perplexity by. Caches that are merely coarse
stay below `BROKEN`, those that do not fit a model lie far above it; docs/generation.md has figures.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from jkvq.cache.calibrated import Calibration
from jkvq.cache.layout import pages_for, pages_of_window, stored_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec import CacheSpec
from jkvq.cache.specs.spec_text import parse_spec, spec_text
from jkvq.calibration.artefact import calibration_digest
from jkvq.calibration.prose import default_text
from jkvq.defaults import PLAIN_CACHE
from jkvq.evaluation.corpus import first_tokens
from jkvq.evaluation.perplexity import compare
from jkvq.evaluation.subjects import CHUNK, Cached
from jkvq.llm import LLM, with_cache
from jkvq.models.model import Model
from jkvq.support.atomic import written_whole
from jkvq.support.errors import UserError
from jkvq.support.memory import format_bytes, free_bytes
from jkvq.support.progress import note
from jkvq.support.user_cache import cache_folder
from jkvq.version import VERSION

BROKEN = 0.5  # nats: the perplexity is multiplied by about 1.6
_SCORED, _MOST = 384, 4096  # tokens that are scored, and that are read
_LETTERS = 20  # of the text for each token: more than any tokenizer makes one of


@dataclass(frozen=True)
class Check:
    """What a cache does to a model.

    kl: of the next token against the 16-bit cache, in nats, mean over the scored tokens.
    tokens, scored: of the text.
    """

    cache: str
    kl: float
    tokens: int
    scored: int

    @property
    def broken(self) -> bool:
        return not self.kl <= BROKEN  # NaN is broken too


def check_cache(model: Model, cached: LLM, calibration: Calibration | None) -> Check | None:
    """Checks a cache on its first use with a model; later uses get the kept result.

    Args:
        model: without a cache.
        cached: the same with the cache in question.
        calibration: what that cache was made with.

    Returns:
        None if there is nothing to check: the cache rounds to 16 bits at most, or all tokens of
        the model's context stay in its windows. None too, with a line that says so, if it takes too
        many tokens or too much memory to look at packed ones.
    """
    first, tokens = _extent(cached.spec, model.config.context)
    if not _packs(cached.spec) or tokens - first < 2:
        return None
    # Where positions are farthest from those that a calibration has read
    position = model.config.context - tokens
    place = _place(model, cached, calibration, tokens, position)
    kept = read_check(place)
    if kept is not None:
        return kept
    name, reason = spec_text(cached.spec), _too_much(model, cached, tokens)
    if reason is not None:
        note(f"{name} was not checked: {reason}")
        return None
    if place.exists():
        note(f"{place} is damaged: checking {name} again")
    text = default_text()[-_LETTERS * tokens :].partition("\n\n")[2]  # not what calibration reads
    ids, label = first_tokens(model.tokenizer, text, tokens), f"Checking {name}"
    plain = with_cache(model, PLAIN_CACHE, implementation=cached.implementation)
    subjects = {"16 bits": Cached(plain), name: Cached(cached)}
    scores = compare(
        subjects, ids, reference="16 bits", first=first + 1, position=position, label=label
    )
    kl = scores[name].kl
    assert kl is not None
    found = Check(name, kl, tokens, scores[name].scored)
    _keep(found, place)
    return found


def _packs(spec: CacheSpec) -> bool:
    return any(side.codec != "float" for side in spec.sides)


def _extent(spec: CacheSpec, context: int) -> tuple[int, int]:
    """The first token that reads a packed one, and how many tokens to read."""
    first = spec.sink + spec.recent + spec.page - 1 if spec.windowed else 0
    return first, min(context, first + _SCORED)


def _too_much(model: Model, cached: LLM, tokens: int) -> str | None:
    """Why a check would cost too much; None if it does not."""
    if tokens > _MOST:
        return f"behind its windows that takes {tokens:,} tokens; `jkvq eval ppl` does it"
    free = free_bytes()
    caches = sum(
        stored_bytes(
            spec,
            CacheShape.of(model.config),
            pages := pages_for(tokens, spec) + 2,
            1 + pages_of_window(spec),
            pages,
        )
        for spec in (parse_spec(PLAIN_CACHE), cached.spec)
    )
    needed = caches + 4 * CHUNK * model.config.vocab * 4  # logits, two distributions, their product
    if free is not None and needed > free:
        return f"that takes {format_bytes(needed)} of memory, and {format_bytes(free)} are free"
    return None


def _place(
    model: Model, cached: LLM, calibration: Calibration | None, tokens: int, position: int
) -> Path:
    """The file of a result, named by everything that it depends on."""
    parts = (
        model.fingerprint,
        model.params["embedding"].dtype.name,
        repr(cached.spec),
        cached.implementation,
        "" if calibration is None else calibration_digest(calibration),
        tokens,
        position,
        VERSION,
    )
    name = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
    return cache_folder() / "checks" / f"{name}.json"


def read_check(place: Path) -> Check | None:
    """A kept result; None if there is none or it is damaged."""
    try:
        kept = json.loads(place.read_text())
        return Check(**kept | {"kl": float(kept["kl"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(found: Check, place: Path) -> None:
    """Writes a result; where that cannot be, the next use checks again."""
    try:
        with written_whole(place) as file:
            json.dump(dataclasses.asdict(found), file)
    except UserError as error:
        note(f"the check of {found.cache} could not be kept: {error}")
