import pytest

import jkvq
from jkvq.spec import PRESETS, CacheSpec, SideSpec, parse_spec, split_specs


def test_parse_spec_with_overrides():
    spec = parse_spec("bf16, page=128")
    assert spec == CacheSpec(SideSpec(16), SideSpec(16), page=128)
    assert spec.bits_per_element == 16


@pytest.mark.parametrize("name", PRESETS)
def test_parse_spec_by_preset_name(name):
    assert parse_spec(name) is not None
    assert parse_spec(name) == PRESETS[name].spec


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bf61", "cache 'bf61' is not known: did you mean bf16?"),
        ("zzz", "known: bf16, f32"),
        ("bf16,page=65", "page=65: .*power of two"),
        ("bf16,page=many", "page=many is not a number"),
        ("bf16,sheet=64", "'sheet=64' is no override; allowed: page="),
        ("bf16,page", "'page' is no override"),
    ],
)
def test_parse_spec_of_bad_text_says_what_is_allowed(text, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        parse_spec(text)


def test_split_specs_keeps_overrides_with_their_cache():
    assert list(split_specs("bf16,page=128,f32")) == ["bf16,page=128", "f32"]
