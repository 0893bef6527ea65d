import dataclasses
import itertools
import shutil
from typing import Any

import numpy as np
import pytest

import jkvq
from jkvq.cache.footprint import bits_per_element, pool_bytes
from jkvq.cache.shape import CacheShape
from jkvq.calibration.artefact import default_folder
from jkvq.calibration.learning.text import cut
from jkvq.calibration.tuning import choose, sensitivity, widths
from jkvq.evaluation.perplexity import compare
from jkvq.evaluation.subjects import Cached
from jkvq.loading import tune as tuning
from jkvq.loading.calibrate import Corpus
from jkvq.models.decoder import weight_bytes
from jkvq.support.progress import count_bar
from tests.tiny import biased_model

TEXT = Corpus("letters", "".join(map(chr, np.random.default_rng(0).integers(97, 123, 3000))))
SMALL = widths.Window(64, 64, 16)
HOW = {"text": TEXT, "window": 256, "context": 1024}


@pytest.fixture(scope="module")
def model():
    return biased_model(2.0, 3.0)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Two widths and one window; layers' losses are measured once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (widths, tuning):
            patch.setattr(module, "WINDOWS", (SMALL,))
        patch.setattr(widths, "KEYS", widths.KEYS[::2])
        patch.setattr(widths, "VALUES", widths.VALUES[::2])
        coded = itertools.starmap(widths.Pair, itertools.product(range(2), repeat=2))
        patch.setattr(widths, "PAIRS", (*coded, widths.Pair(None, None)))
        once = {}

        def measured_once(*how, wrapped=tuning.sensitivities):
            if "" not in once:
                once[""] = wrapped(*how)
            return once[""]

        patch.setattr(tuning, "sensitivities", measured_once)
        yield


@pytest.fixture(scope="module")
def calibration(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated") / "artefact"
    jkvq.calibrate(model, text=TEXT, tokens=1024, out=folder)
    return folder


def batches(model, window):
    """Two, of four windows each."""
    tokens, how = model.tokenizer.encode(TEXT.text), {"leading": 0, "batch": 4, "seed": 0}
    narrow = jkvq.parse_spec("jkvq-int2,recent=64")
    text = cut(tokens, narrow, window=window, context=1024, **how)
    return [text.batch_of(step) for step in range(2)]


def layers_alone(how: tuple[Any, Any, Any], windows, read):
    """The KL of one layer at a time."""
    options = widths.side_options(windows)
    with count_bar("", 2 * len(read) * len(options)) as bar:
        return sensitivity.sensitivities(*how, options, read, bar)


def test_bits_are_kept_and_the_cache_loads_by_its_name(model, calibration, tmp_path):
    found = jkvq.tune(
        model, bits=7.5, calibration=calibration, out=tmp_path / "out", name="mine", **HOW
    )
    shape = CacheShape.of(model.config)
    assert found.bits == bits_per_element(found.spec, shape, 1024) <= 7.5
    assert jkvq.parse_spec("mine") == jkvq.parse_spec(found.text) == found.spec
    assert jkvq.parse_spec("mine,page=128") == dataclasses.replace(found.spec, page=128)
    with pytest.raises(jkvq.UserError, match="layers of mine have codes of their own"):
        jkvq.parse_spec("mine,value.bits=3")
    assert jkvq.load_artefact(tmp_path / "out").manifest.caches == {"mine": found.text}
    llm = jkvq.with_cache(model, "mine", tmp_path / "out")
    assert llm.spec == found.spec
    # As measured over its pages: less than with the narrowest codes everywhere
    narrow = jkvq.with_cache(model, "jkvq-int2,recent=64", calibration)
    exact = jkvq.with_cache(model, "f32")
    caches = {"exact": Cached(exact), "mine": Cached(llm), "narrow": Cached(narrow)}
    tokens = model.tokenizer.encode(TEXT.text)[-512:]
    scores = compare(caches, tokens, reference="exact", context=256)
    kl, narrow_kl = scores["mine"].kl, scores["narrow"].kl
    assert kl is not None
    assert narrow_kl is not None
    assert kl < 0.8 * narrow_kl


def test_what_is_kept_is_healed_and_that_of_other_weights_stays(
    model, calibration, tmp_path, monkeypatch, capsys
):
    chosen = jkvq.parse_spec("jkvq-int2"), 0.0
    monkeypatch.setattr(tuning, "_chosen", lambda *_: chosen)
    monkeypatch.setattr(tuning, "CALIBRATION_TOKENS", 256)
    monkeypatch.setenv("JKVQ_CACHE", str(tmp_path))
    folder = default_folder(model.name, "jkvq")
    shutil.copytree(calibration, folder)
    (folder / "manifest.json").write_text('{"format": 6}')
    assert jkvq.tune(model, bits=7.5, **HOW).folder == folder
    assert "format 6, and this version reads 7: calibrating on 256 tok" in capsys.readouterr().err
    healed = jkvq.load_artefact(folder).manifest
    assert (healed.weights, healed.tokens) == (model.fingerprint, 256)
    other = biased_model(1.0)
    found = jkvq.tune(other, bits=7.5, **HOW)
    assert found.folder.parent == folder.parent
    assert jkvq.load_artefact(found.folder).manifest.weights == other.fingerprint
    assert jkvq.load_artefact(folder).manifest == healed


def test_a_kl_is_kept(model, calibration, tmp_path):
    how = {"calibration": calibration, **HOW}
    narrow = jkvq.tune(model, max_kl=1.0, out=tmp_path / "narrow", **how)
    assert narrow.spec.other_layers == narrow.spec.exact_layers == ()
    assert narrow.spec.key.bits == narrow.spec.value.bits == 2
    half = jkvq.tune(model, max_kl=narrow.kl / 2, out=tmp_path / "half", **how)
    assert half.kl <= 1.3 * narrow.kl / 2  # on other text than it was chosen by
    assert narrow.bits < half.bits < 16


def test_memory_is_kept(model, calibration, tmp_path):
    weights = weight_bytes(model.config, np.float32)
    shape = CacheShape.of(model.config)
    wide, narrow = (
        weights + pool_bytes(jkvq.parse_spec(f"jkvq-int{bits},recent=64"), shape, 512, 3)
        for bits in (4, 2)
    )
    memory = (wide + narrow) // 2
    how = {"calibration": calibration, **HOW, "context": 512, "batch": 3}
    found = jkvq.tune(model, memory=str(memory), out=tmp_path / "out", **how)
    assert narrow <= weights + pool_bytes(found.spec, shape, 512, 3) <= memory
    with pytest.raises(jkvq.UserError, match=r"the smallest cache takes .* at 512 tokens"):
        jkvq.tune(model, memory=str(narrow - 1), out=tmp_path / "no", **how)


def test_losses_of_layers_add_up_to_about_the_kl(model, calibration):
    """Of those that were measured one by one, against all of them together over pages."""
    how = model.config, model.params, jkvq.load_artefact(calibration).calibration
    losses = layers_alone(how, SMALL, batches(model, 256))
    every = choose.candidates({SMALL: losses}, model.config.head_dim)
    narrow = every[-1]
    assert narrow.spec == jkvq.parse_spec("jkvq-int2,recent=64")
    llm = jkvq.with_cache(model, narrow.spec, calibration)
    caches = {"": Cached(jkvq.with_cache(model, "f32")), "narrow": Cached(llm)}
    tokens = model.tokenizer.encode(TEXT.text)[: 8 * 256]
    kl = compare(caches, tokens, reference="", context=256)["narrow"].kl
    assert kl is not None
    read = 256 - 191  # tokens of a window that read coded ones
    assert 0.5 < narrow.loss / (kl * 256 / read) < 2


@pytest.mark.slow
def test_wider_codes_and_windows_take_off_as_much_as_measured_layer_by_layer(model, calibration):
    config, small, wide = model.config, SMALL, widths.Window(64, 128, 8)
    how = config, model.params, jkvq.load_artefact(calibration).calibration
    read = batches(model, 512)
    at_small, at_wide = (layers_alone(how, window, read) for window in (small, wide))
    options, narrow = widths.side_options(small), [0, len(widths.KEYS)]  # of keys, of values
    alone = dict(zip(options, at_small, strict=True))
    for other in set(options) - set(widths.narrowest_alike(options)):
        del alone[other]
    assert len(alone) == 3  # keys with digits and without, values
    with count_bar("", 8) as bar:
        found = sensitivity.losses_of_options(*how, alone, small, (small, wide), read, bar)
    assert list(found) == [small, wide]
    np.testing.assert_allclose(found[small][narrow], at_small[narrow])
    for told, now in zip(found[small], at_small, strict=True):
        assert abs(told.sum() - now.sum()) < 0.2 * now.sum()
    for option in narrow:
        before, now, told = (x[option].sum() for x in (at_small, at_wide, found[wide]))
        assert abs(told - now) < 0.2 * now
        assert abs(told - now) < 0.5 * abs(before - now)  # much nearer than what it was made from


def test_text_windows_decide_which_windows_are_looked_at(monkeypatch):
    every = tuple(widths.Window(64, recent, 8) for recent in (64, 256, 832))
    monkeypatch.setattr(tuning, "WINDOWS", every)
    found = {window: len(tuning._usable(window)) for window in (128, 256, 1024, 2048)}
    assert found == {128: 1, 256: 1, 1024: 2, 2048: 3}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "give one of bits, max_kl and memory"),
        ({"bits": 3, "max_kl": 1}, "give one of bits, max_kl and memory"),
        ({"bits": 3, "name": "jkvq-int2"}, "name=jkvq-int2: a cache has that name already"),
        ({"bits": 3, "name": "../x"}, "name=../x: small letters"),
        ({"bits": 3, "context": 4096}, "context=4096: 64 to 1024 tokens"),
        ({"bits": 2}, "bits=2: the smallest cache takes 6.5 at 1,024 tokens; give more"),
        ({"max_kl": 1e-6, "bits": None}, None),
    ],
)
def test_what_cannot_be_is_refused(options, sentence, model, calibration, tmp_path):
    how = HOW | {"calibration": calibration, "out": tmp_path / "out"} | options
    if sentence is None:  # exact layers alone have so little
        assert jkvq.tune(model, **how).spec.key.bits == 16
        return
    with pytest.raises(jkvq.UserError, match=sentence):
        jkvq.tune(model, **how)
    assert not (tmp_path / "out").exists()
