import inspect
from typing import get_args

import pytest

import jkvq
from jkvq.calibration.allocation import SCORES
from jkvq.calibration.rotations import FACTORS
from jkvq.calibration.solve import (
    KEY_TARGETS,
    METHODS,
    OPTIONS_OF,
    VALUE_TARGETS,
    CalibrationOptions,
)
from jkvq.cli.calibrate import calibrate
from tests.cli.running import run


def _options():
    parameters = inspect.signature(calibrate).parameters.values()
    return {each.name: get_args(each.annotation)[1] for each in parameters}


def test_help_names_every_choice():
    options = _options()
    for name, choices in (
        ("method", METHODS),
        ("key_target", KEY_TARGETS),
        ("value_target", VALUE_TARGETS),
        ("without", FACTORS),
        ("score", SCORES),
    ):
        words = options[name].help.replace(",", " ").replace(";", " ").replace(".", " ").split()
        assert set(choices) <= set(words), name


@pytest.mark.parametrize(
    "name",
    [
        "key_target",
        "value_target",
        "centroids",
        "starts",
        "seed",
        "score",
        "window",
        "steps",
        "batch",
        "rate",
    ],
)
def test_help_shows_the_methods_own_defaults(name):
    assert _options()[name].show_default == str(getattr(CalibrationOptions, name))


def test_help_says_which_options_belong_to_which_method():
    shown = {
        name: option.rich_help_panel
        for name, option in _options().items()
        if option.rich_help_panel is not None
    }
    assert shown == {
        name: f"For {' and '.join(methods)}"
        for methods, names in OPTIONS_OF.items()
        for name in names
    }


def test_calibrate_hands_on_what_was_given_and_nothing_else(monkeypatch):
    def seen(model, **options):
        assert model == "m"
        given = {name: value for name, value in options.items() if value is not None}
        assert given == {
            "method": "oscar",
            "self_written": False,
            "tokens": 300,
            "shared": True,
            "without": ("hadamard",),
            "window": 64,
        }
        raise jkvq.UserError("seen")

    monkeypatch.setattr("jkvq.loading.calibrate.calibrate", seen)
    with pytest.raises(jkvq.UserError, match="seen"):
        run(
            *("calibrate", "--model", "m", "--method", "oscar", "--tokens", "300"),
            *("--shared", "--without", "hadamard", "--window", "64"),
        )


@pytest.mark.parametrize(
    ("arguments", "cache"),
    [(["--learn"], "jkvq-int2"), (["--learn-for", "jkvq-int3"], "jkvq-int3"), ([], None)],
)
def test_calibrate_learns_for_the_cache_that_is_named(arguments, cache, monkeypatch):
    def seen(model, **options):
        assert options.get("learn_for") == cache
        raise jkvq.UserError("seen")

    monkeypatch.setattr("jkvq.loading.calibrate.calibrate", seen)
    with pytest.raises(jkvq.UserError, match="seen"):
        run("calibrate", *arguments)


def test_learning_is_refused_to_methods_that_do_not_learn():
    with pytest.raises(jkvq.UserError, match="--learn: only method jkvq learns, not oscar"):
        run("calibrate", "--learn", "--method", "oscar")
