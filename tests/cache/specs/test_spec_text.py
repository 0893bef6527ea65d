import pytest

import jkvq
from jkvq.cache.specs.presets import PRESETS
from jkvq.cache.specs.spec import CacheSpec, OtherLayers, SideSpec
from jkvq.cache.specs.spec_text import parse_spec, spec_text, split_names


def test_parse_spec_with_overrides():
    exact = SideSpec(16, "float")
    assert parse_spec("bf16, page=128") == CacheSpec(exact, exact, page=128)
    spec = parse_spec("int4,key.bits=3,clip=0.9,value.group=64,sink=4,recent=32,exact_layers=2+0")
    assert spec == CacheSpec(
        SideSpec(3, clip=0.9),
        SideSpec(4, clip=0.9, group=64),
        sink=4,
        recent=32,
        exact_layers=(0, 2),
    )


def test_parse_spec_of_a_side_wins_over_both_wherever_it_stands():
    expected = CacheSpec(SideSpec(8), SideSpec(2))
    assert parse_spec("int4,bits=2,key.bits=8") == expected
    assert parse_spec("int4,key.bits=8,bits=2") == expected


def test_parse_spec_of_some_layers():
    spec = parse_spec("int4,bits=3@0+2-4,value.bits=8@4,clip=0.9")
    four, three = (SideSpec(bits, clip=0.9) for bits in (4, 3))
    others = OtherLayers((0, 2, 3), three, three), OtherLayers((4,), three, SideSpec(8, clip=0.9))
    assert spec == CacheSpec(four, four, other_layers=others)
    assert spec.of_layer(4) == CacheSpec(three, SideSpec(8, clip=0.9))
    assert spec.of_layer(1) == CacheSpec(four, four)


@pytest.mark.parametrize("name", PRESETS)
def test_parse_spec_by_preset_name(name):
    assert parse_spec(name) is not None
    assert parse_spec(name) == PRESETS[name].spec


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("int4,page=64@0", "page=64@0: the same in all layers; leave out @"),
        ("int4,bits=3@x", r"bits=3@x: behind @ stand numbers of layers, such as 0\+1 or 0\+4-7"),
        ("int4,bits=3@5-2", "bits=3@5-2: behind @ stand numbers of layers"),
        ("int4,bits=3@0,exact_layers=0", "layer 0 is exact and has codes of its own"),
        ("bf61", "cache 'bf61' is not known: did you mean bf16?"),
        ("zzz", r"'zzz' is not known: there are bf16, f32, int\*, .* `jkvq caches` lists"),
        ("bf16,page=65", "page=65: .*power of two"),
        ("bf16,page=many", "page=many cannot be read; allowed: a whole number"),
        ("bf16,sheet=64", "'sheet=64' is no override; allowed are NAME=VALUE of page, sink"),
        ("bf16,page", "'page' is no override"),
        ("int4,key.page=8", "'key.page=8' is no override"),
        ("int4,bits=2,bits=8", "cache 'int4,bits=2,bits=8': bits is given twice; give it once"),
        ("int4,page=8,page=8", "page is given twice"),
        ("int4,key.bits=2,bits=3,key.bits=2", r"key\.bits is given twice"),
        ("int4,center=maybe", "center=maybe cannot be read; allowed: true or false"),
        ("kmeans16-int4,center=true", "center=True: allowed: false with centroids"),
        ("int4,bits=5", "bits=5: allowed: 2, 3, 4, 8 for codec affine"),
        ("int4,group=16", "group=16: allowed: 32 or more"),
        ("int4,clip=1.5", "clip=1.5"),
        ("int4,rotation=oskar", "rotation=oskar: allowed: none, bdr16"),
        ("int4,sink=4", "sink=4, recent=0: both 0, or recent at least 1"),
        ("jkvq-int2,window_bits=4", "window_bits=4: allowed: 8, 16"),
        ("jkvq-int2,window_bits=half", "window_bits=half cannot be read; allowed: 8 or 16"),
        ("int4,window_bits=8", "window_bits=8: only of windows .recent=64, say. behind which"),
        ("bf16,recent=64,window_bits=8", "window_bits=8: only of windows"),
        ("tq-k3v3,clip=0.9", "clip=0.9: allowed: only with codec affine"),
        ("jkvq-int2,key.digits=2+1+1", r"digits=\(2, 1, 1\): allowed: 4 numbers that add up to 4"),
        ("jkvq-int4,key.digits=2+1+1+0", "allowed: up to 6 bits in all; or digits=none"),
        ("jkvq-int2,key.clip=0.9", "only with rotation=balanced and .*; or digits=none"),
        ("jkvq-int2,rotation=saw", "only with rotation=balanced and .*; or digits=none"),
        ("jkvq-int2,digits=2+1+1+0", "value.digits: values have one each"),
        ("jkvq-int2,key.digits=two", "key.digits=two cannot be read; allowed: numbers with"),
    ],
)
def test_parse_spec_of_bad_text_says_what_is_allowed(text, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        parse_spec(text)


@pytest.mark.parametrize(
    "text",
    [
        *PRESETS,
        "int4,center=true",
        "int4,exact_layers=0+2,page=128,sink=128,recent=128",
        "jkvq-int2,recent=704,window_bits=8",
        "int4,group=32,key.bits=3,value.bits=2",
        "jkvq-int3,key.clip=0.9,value.rotation=none",
        "jkvq-int2,key.digits=none",
        "jkvq-int2,exact_layers=7-9,key.bits=4@0+3-5,key.digits=none@0+3-5,value.bits=3@1",
        "jkvq-int3,key.digits=2+2+0+0",
        "kmeans256-int4,value.rotation=saw",
    ],
)
def test_spec_text_is_read_as_the_same_spec(text):
    spec = parse_spec(text)
    assert parse_spec(spec_text(spec)) == spec
    assert len(spec_text(spec)) <= len(text)
    if text in PRESETS:
        assert spec_text(spec) == text


def test_spec_text_of_what_no_text_gives_shows_the_fields():
    spec = CacheSpec(SideSpec(4, centroids=7), SideSpec(4))
    assert "centroids=7" in spec_text(spec)


def test_split_names_keeps_overrides_with_their_cache():
    assert split_names("bf16,page=128, f32,f32") == ["bf16,page=128", "f32"]
