import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType

from jkvq import UserError
from jkvq.models.formats.gguf_header import read_header
from tests.models.helpers import finish


def write_example(path: Path, alignment: int | None = None) -> Path:
    """A file with every kind of metadata and several kinds of tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -100)
    writer.add_uint16("a.uint16", 60_000)
    writer.add_int16("a.int16", -30_000)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -2_000_000_000)
    writer.add_uint64("a.uint64", 2**63 + 1)
    writer.add_int64("a.int64", -(2**62))
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.true", True)
    writer.add_bool("a.false", False)
    writer.add_string("a.string", "naïve 🙂\n")
    writer.add_string("a.empty", " ")
    writer.add_array("a.strings", ["<s>", "", "é", "▁the"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1e6, 3.1])
    writer.add_array("a.bools", [True, False, True])
    for kind in (GGUFValueType.UINT8, GGUFValueType.UINT16, GGUFValueType.UINT64):
        writer.add_key_value(f"a.array.{kind.name}", [1, 2, 250], GGUFValueType.ARRAY, kind)
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((6, 64)).astype(np.float32)
    writer.add_tensor("f32", matrix)
    writer.add_tensor("vector", matrix[0, :5])
    writer.add_tensor("cube", matrix.reshape(2, 3, 64).astype(np.float16))
    for kind in (Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.BF16):
        writer.add_tensor(kind.name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("gguf") / "example.gguf")


def test_metadata_equals_the_gguf_package_s(example):
    theirs = {
        name: field.contents()
        for name, field in gguf.GGUFReader(example).fields.items()
        if not name.startswith("GGUF.")  # counts that its reader adds
    }
    ours = read_header(example).metadata
    assert ours == theirs
    assert {name: type(value) for name, value in ours.items()} == {
        name: type(value) for name, value in theirs.items()
    }
    assert ours["a.int16"] == -30_000 and ours["a.strings"] == ["<s>", "", "é", "▁the"]


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path, alignment):
    path = write_example(tmp_path / "aligned.gguf", alignment)
    theirs = {
        tensor.name: (
            tuple(tensor.shape[::-1].tolist()),  # it gives them innermost first
            tensor.tensor_type,
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    ours = read_header(path).tensors
    assert len(ours) == 7
    assert {
        name: (info.shape, info.kind, info.offset, info.bytes) for name, info in ours.items()
    } == theirs


def test_truncated_file_is_refused_wherever_it_ends(example, tmp_path):
    whole = example.read_bytes()
    tensors = read_header(example).tensors.values()
    end = max(info.offset + info.bytes for info in tensors)
    cut = tmp_path / "cut.gguf"
    for size in {*range(4, end, 13), end - 1}:
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.gguf is truncated.*fetch it again"):
            read_header(cut)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\0" * 64])
def test_file_is_refused_when_not_a_gguf(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.gguf is not a GGUF file"):
        read_header(path)


def test_file_is_refused_when_its_version_is_unknown(example, tmp_path):
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + example.read_bytes()[8:])
    with pytest.raises(UserError, match="version 1; 2 and 3 are supported"):
        read_header(path)


@pytest.mark.parametrize("length", [2**31, 2**40, 2**63])
def test_file_is_refused_when_a_length_is_damaged(example, tmp_path, length):
    whole, path = example.read_bytes(), tmp_path / "damaged.gguf"
    first_key = 4 + 4 + 8 + 8  # magic, version and two counts stand before it
    path.write_bytes(whole[:first_key] + struct.pack("<Q", length) + whole[first_key + 8 :])
    with pytest.raises(UserError, match=r"damaged\.gguf is truncated or damaged"):
        read_header(path)
