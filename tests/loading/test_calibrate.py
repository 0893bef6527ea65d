import numpy as np

import jkvq
from jkvq.cache.specs.kept_names import keep_name
from jkvq.calibration.learning.learn import Outcome
from jkvq.loading.calibrate import Corpus
from tests.tiny import tiny_model

TEXT = Corpus("letters", "".join(map(chr, np.random.default_rng(0).integers(97, 123, 1500))))
HOW = {"text": TEXT, "tokens": 96, "window": 96, "context": 128, "batch": 4}


def test_a_cache_is_learned_for_by_what_its_name_means(tmp_path, monkeypatch):
    """So that a killed run goes on only where that is the same."""
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))
    identities = []

    def learn(config, params, start, spec, text, *, identity, **_):
        identities.append(identity)
        return Outcome(start, 1.0, 0.5, 1)

    monkeypatch.setattr("jkvq.loading.learn.learn", learn)
    for name in ("jkvq-int2", "jkvq-int3"):
        text = f"{name},page=16,recent=16,sink=16"
        keep_name("mine", text)
        made = jkvq.calibrate(tiny_model(), learn_for="mine", out=tmp_path / name, **HOW)
        assert made.manifest.options["learn_for"] == text
    assert len(set(identities)) == 2
