from pathlib import Path

import pytest

import jkvq
from jkvq.evaluation.compared import (
    cache_of,
    folder_of,
    in_windows,
    method_of,
    read_windows,
    windows_of,
)


def test_a_name_says_its_cache_its_calibration_its_method_and_its_windows():
    name = "jkvq-int2,sink=0,calibration=some/where,recent=32,page=32"
    assert cache_of(name) == "jkvq-int2,sink=0,recent=32,page=32"
    assert folder_of(name) == Path("some/where")
    assert method_of(name) == "jkvq-int2,calibration=some/where,page=32"
    assert windows_of(name) == (0, 32)
    assert folder_of("int4") is None
    assert windows_of("kivi-int2") == (0, 0)
    with pytest.raises(jkvq.UserError, match="calibration is given twice"):
        folder_of("jkvq-int2,calibration=a,calibration=b")


def test_each_cache_is_there_as_it_is_and_in_every_pair_of_windows():
    pairs = read_windows("none, 64+64,64+256")
    assert pairs == [(0, 0), (64, 64), (64, 256)]
    # jkvq-int2 has 64 + 256 of its own; bf16 codes nothing; a baseline is as it is.
    assert in_windows(["bf16", "jkvq-int2,calibration=c", "kivi-int2", "int4"], pairs) == [
        "bf16",
        "jkvq-int2,calibration=c",
        "jkvq-int2,sink=0,recent=0,calibration=c",
        "jkvq-int2,sink=64,recent=64,calibration=c",
        "kivi-int2",
        "int4",
        "int4,sink=64,recent=64",
        "int4,sink=64,recent=256",
    ]
    assert in_windows(["saw-int4,sink=64,recent=64"], [(0, 0)]) == [
        "saw-int4,sink=64,recent=64",
        "saw-int4,sink=0,recent=0",
    ]
    # Windows of 8 bits stay so, where there are any.
    found = in_windows(["jkvq-int2-w8", "int2,recent=64,window_bits=8"], [(0, 0), (64, 64)])
    assert found == [
        "jkvq-int2-w8",
        "jkvq-int2-w8,sink=0,recent=0,window_bits=16",
        "jkvq-int2-w8,sink=64,recent=64",
        "int2,recent=64,window_bits=8",
        "int2,sink=0,recent=0,window_bits=16",
        "int2,sink=64,recent=64,window_bits=8",
    ]
    assert all(map(jkvq.parse_spec, found))


@pytest.mark.parametrize("text", ["64", "a+b", "64+64+64", ""])
def test_windows_that_cannot_be_read_are_refused(text):
    with pytest.raises(jkvq.UserError, match=r"windows=.*: none, or tokens at the beginning"):
        read_windows(text)
