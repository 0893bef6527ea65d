"""A model whose keys suffer from codes, and a text that it is calibrated on."""

import functools

import numpy as np

from jkvq.loading.calibrate import Corpus
from jkvq.models.model import Model
from tests.tiny import biased_model

CACHE = "jkvq-int2,page=16,recent=16,sink=16"
CALIBRATED_TOKENS = 1024
TEXT = Corpus("letters", "".join(map(chr, np.random.default_rng(0).integers(97, 123, 4800))))


@functools.cache
def model() -> Model:
    return biased_model(2.0, 3.0)
