"""Language models in JAX with a paged KV cache.

import jkvq

llm = jkvq.load("smollm2-135m")
print(jkvq.generate(llm, "Why is the sky blue?", max_new_tokens=64).text)
"""

from jkvq.cache.calibrated import Calibration, SideCalibration
from jkvq.cache.spec import CacheSpec, SideSpec
from jkvq.cache.spec_text import parse_spec
from jkvq.calibration.artefact import Artefact, load_artefact
from jkvq.engine.generate import Generation, Options, Piece, generate, stream
from jkvq.llm import LLM, with_cache
from jkvq.loading.calibrate import calibrate
from jkvq.loading.load import load
from jkvq.support.errors import CacheWarning, UserError

__all__ = [
    "LLM",
    "Artefact",
    "CacheSpec",
    "CacheWarning",
    "Calibration",
    "Generation",
    "Options",
    "Piece",
    "SideCalibration",
    "SideSpec",
    "UserError",
    "calibrate",
    "generate",
    "load",
    "load_artefact",
    "parse_spec",
    "stream",
    "with_cache",
]
