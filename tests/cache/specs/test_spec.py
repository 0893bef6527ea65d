import pytest

import jkvq
from jkvq.cache.specs.spec_text import parse_spec


@pytest.mark.parametrize(
    ("text", "head_dim", "sentence"),
    [
        ("bdr128-k", 64, "head_dim=64: key rotation bdr128 needs a multiple of 128"),
        ("quarot-int4", 80, "head_dim=80: key rotation hadamard needs a power of two"),
        ("oscar-int2", 96, "head_dim=96: key rotation oscar needs a power of two; use rotation="),
        ("int4,value.group=64", 80, "head_dim=80: value group 64 does not divide it"),
        ("int3", 20, "head_dim=20: key bits=3: 20 codes of 3 bits do not fill whole 16-bit words"),
        ("int4,exact_layers=7", 64, "exact_layers=7: this model has layers 0 to 3"),
        ("int2,sink=64,recent=4033", 64, "sink=64, recent=4096: together at most .* 4096"),
    ],
)
def test_check_refuses_what_a_model_cannot_have(text, head_dim, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        parse_spec(text).check(4, head_dim, 4096)


def test_packed_keeps_between_recent_and_a_page_more_exact():
    spec = parse_spec("int2,page=8,sink=4,recent=10")
    for length in range(100):
        packed = spec.packed(length)
        assert packed % 8 == 0
        exact = length - packed
        # The sink and the recent window are whole pages.
        assert exact == length if length < 32 else 8 + 16 <= exact < 8 + 16 + 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("jkvq-int4,value.rotation=oscar", "calibrations of methods jkvq and oscar, and takes one"),
        ("oscar-int2,key.rotation=balanced@3", "methods oscar and jkvq"),
        ("hessian-int4,value.rotation=oscar", "methods hessian and oscar"),
        ("blockgtq-k3v3,value.rotation=oscar", "methods blockgtq and oscar"),
        ("kmeans16-int4,rotation=balanced", "methods kmeans16 and jkvq"),
        ("hessian-int4,value.rotation=hessian", "value.rotation=hessian: it is found for keys"),
    ],
)
def test_one_calibration_has_to_serve_all_sides(text, sentence):
    with pytest.raises(jkvq.UserError, match=sentence):
        parse_spec(text)
