"""The measurements of a comparison: kept by cache, and made again where they no longer hold."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jkvq.attention.implementation import choose_implementation
from jkvq.bench.engine import Request, bench_engine
from jkvq.cache.calibrated import Calibration
from jkvq.cache.footprint import bits_per_element, sequence_bytes
from jkvq.cache.shape import CacheShape
from jkvq.cache.specs.spec_text import parse_spec
from jkvq.calibration.artefact import calibration_digest
from jkvq.cli.compare.kept import Parts, kept_or_measured
from jkvq.defaults import PLAIN_CACHE
from jkvq.evaluation.baselines import BASELINES
from jkvq.evaluation.compared import cache_of
from jkvq.evaluation.corpus import leading_tokens
from jkvq.evaluation.fidelity import Fidelity, fidelity
from jkvq.evaluation.perplexity import Score, compare_lengths
from jkvq.evaluation.plots import fidelity_figure, kl_figure
from jkvq.evaluation.subjects import reconstruction, subject
from jkvq.llm import LLM, with_cache
from jkvq.models.model import Model
from jkvq.support.pictures import save_picture

Found = dict[str, dict[str, Any]]  # figures by cache
Scores = dict[int, dict[str, Score]]  # by tokens that were read, and cache
CONTEXTS = (2048, 16384, 131072)
_AT_ONCE = 8  # requests, when speed is measured


@dataclass(frozen=True)
class Stages:
    """Caches of one model, measured into a folder.

    caches: that everything is measured of; the 16-bit one is the first.
    calibrations: of these, and of those whose perplexity is measured alone.
    """

    out: Path
    model: Model
    caches: Sequence[str]
    calibrations: Mapping[str, Calibration | None]
    implementation: str | None

    def llm(self, cache: str) -> LLM:
        known = self.calibrations[cache]
        return with_cache(self.model, cache, known, implementation=self.implementation)

    def memory(self) -> Found:
        """Bits per element, and bytes of a sequence, at some lengths."""
        shape = CacheShape.of(self.model.config)
        specs = {cache: parse_spec(cache) for cache in self.caches}
        return {
            cache: {
                "bits": {n: bits_per_element(spec, shape, n) for n in CONTEXTS},
                "bytes": {n: sequence_bytes(spec, shape, n) for n in CONTEXTS},
            }
            for cache, spec in specs.items()
        }

    def perplexity(self, tokens: list[int], lengths: Sequence[int], text: str) -> Scores:
        """Perplexity of a text's first tokens, and KL from the 16-bit cache; draws it over bits."""

        def measure(caches: Sequence[str]) -> Found:
            asked = dict.fromkeys((PLAIN_CACHE, *caches))
            subjects = {
                cache: subject(
                    *(self.model, cache_of(cache), self.calibrations[cache]),
                    implementation=self.implementation,
                )
                for cache in asked
            }
            leading = len(leading_tokens(self.model.tokenizer))
            found = compare_lengths(
                subjects, tokens, lengths, reference=PLAIN_CACHE, leading=leading
            )
            return {
                cache: {str(n): dataclasses.asdict(found[n][cache]) for n in lengths}
                for cache in caches
            }

        settings = {"text": text, "tokens": list(lengths), "tokens_sha256": _digest(tokens)}
        kept = self._kept("perplexity", settings, measure, list(self.calibrations))
        scores = {
            n: {cache: Score(**each[str(n)]) for cache, each in kept.items()} for n in lengths
        }
        if any(score.kl for score in scores[lengths[-1]].values()):
            save_picture(kl_figure(scores, f"{self.model.name}, {text}"), self.out / "kl.png")
        return scores

    def fidelity(self, tokens: list[int], text: str) -> Found:
        """What caches do to attention, in the mean over layers; draws it by layers too."""

        def measure(caches: Sequence[str]) -> dict[str, Any]:
            kept = {
                cache: reconstruction(self.model, cache, self.calibrations[cache])
                for cache in caches
            }
            found = fidelity(self.model, tokens, kept)
            return {
                cache: [dataclasses.asdict(layer) for layer in layers]
                for cache, layers in found.items()
            }

        settings = {"text": text, "tokens": len(tokens), "tokens_sha256": _digest(tokens)}
        kept = self._kept("fidelity", settings, measure, self.caches)
        found = {cache: [Fidelity(**layer) for layer in layers] for cache, layers in kept.items()}
        title = f"{self.model.name}, first {len(tokens):,} tokens of {text}"
        save_picture(fidelity_figure(found, title), self.out / "fidelity.png")
        return {cache: _mean(layers) for cache, layers in found.items()}

    def speed(self, requests: Sequence[Request]) -> Found:
        """Tokens per second of the engine with some requests at once, and of single calls."""

        def measure(caches: Sequence[str]) -> Found:
            found = {}
            for cache in caches:  # one engine at a time: each takes most of the memory
                ways = bench_engine({cache: self.llm(cache)}, requests, [_AT_ONCE])
                found[cache] = {each.way: each.tokens_per_second for each in ways}
            return found

        settings = {"requests": len(requests), "at_once": _AT_ONCE}
        return self._kept("speed", settings, measure, self.caches)

    def _kept(
        self,
        stage: str,
        settings: dict[str, Any],
        measure: Callable[[Sequence[str]], Mapping[str, Any]],
        caches: Sequence[str],
    ) -> dict[str, Any]:
        """What a stage has found, now or in an earlier run."""
        parts = {cache: self._parts(cache) for cache in caches}
        place = self.out / f"{stage}.json"
        return kept_or_measured(place, self._settings() | settings, parts, measure)

    def _settings(self) -> dict[str, Any]:
        """What the figures of all caches depend on."""
        plain = parse_spec(PLAIN_CACHE)
        return {
            "model": self.model.name,
            "weights": self.model.fingerprint,
            "dtype": self.model.params["embedding"].dtype.name,
            "implementation": choose_implementation(self.implementation, self.model.config, plain),
        }

    def _parts(self, cache: str) -> Parts:
        """What the figures of one cache, or baseline, depend on besides."""
        name, known = cache_of(cache), self.calibrations[cache]
        return {
            "spec": repr(BASELINES[name] if name in BASELINES else parse_spec(name)),
            "calibration": None if known is None else calibration_digest(known),
        }


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def _mean(layers: Sequence[Fidelity]) -> dict[str, float]:
    """Each measure in the mean over layers."""
    names = [field.name for field in dataclasses.fields(Fidelity)]
    return {name: fmean(getattr(layer, name) for layer in layers) for name in names}
