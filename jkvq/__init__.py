"""Language models in JAX with a paged KV cache.

import jkvq

llm = jkvq.load("smollm2-135m")
print(jkvq.generate(llm, "Why is the sky blue?", max_new_tokens=64).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jkvq.version import VERSION as __version__

if TYPE_CHECKING:
    from jkvq.cache.calibrated import Calibration, SideCalibration, Transform
    from jkvq.cache.specs.spec import CacheSpec, SideSpec
    from jkvq.cache.specs.spec_text import parse_spec
    from jkvq.calibration.artefact import Artefact, load_artefact
    from jkvq.engine.engine import Engine
    from jkvq.engine.generate import Piece, generate, stream
    from jkvq.engine.options import Options
    from jkvq.engine.writer import Generation, Handle
    from jkvq.jobs.batch import Answer, batch
    from jkvq.llm import LLM, with_cache
    from jkvq.loading.calibrate import calibrate
    from jkvq.loading.load import load
    from jkvq.loading.tune import Tuned, tune
    from jkvq.models.model import Model, load_model
    from jkvq.support.errors import CacheWarning, UserError

__all__ = [
    "LLM",
    "Answer",
    "Artefact",
    "CacheSpec",
    "CacheWarning",
    "Calibration",
    "Engine",
    "Generation",
    "Handle",
    "Model",
    "Options",
    "Piece",
    "SideCalibration",
    "SideSpec",
    "Transform",
    "Tuned",
    "UserError",
    "__version__",
    "batch",
    "calibrate",
    "generate",
    "load",
    "load_artefact",
    "load_model",
    "parse_spec",
    "stream",
    "tune",
    "with_cache",
]
# A name is imported when it is first used: `jkvq --help` shall not wait for all of JAX.
_HOMES = {
    "jkvq.cache.calibrated": ("Calibration", "SideCalibration", "Transform"),
    "jkvq.cache.specs.spec": ("CacheSpec", "SideSpec"),
    "jkvq.cache.specs.spec_text": ("parse_spec",),
    "jkvq.calibration.artefact": ("Artefact", "load_artefact"),
    "jkvq.engine.engine": ("Engine",),
    "jkvq.engine.generate": ("Piece", "generate", "stream"),
    "jkvq.engine.options": ("Options",),
    "jkvq.engine.writer": ("Generation", "Handle"),
    "jkvq.jobs.batch": ("Answer", "batch"),
    "jkvq.llm": ("LLM", "with_cache"),
    "jkvq.loading.calibrate": ("calibrate",),
    "jkvq.loading.load": ("load",),
    "jkvq.loading.tune": ("Tuned", "tune"),
    "jkvq.models.model": ("Model", "load_model"),
    "jkvq.support.errors": ("CacheWarning", "UserError"),
}


if not TYPE_CHECKING:  # with it, type checkers would take any name for one of ours

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = getattr(import_module(home), name)
                return globals()[name]
        raise AttributeError(f"module 'jkvq' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return __all__
