"""What stored numbers betray without a tensor library: NaN, infinity, norms that never moved, weights never written."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from speculators.formats.checkpoint import TensorHeader
from speculators.formats.faults import Fault, fault

_CHUNK = 1 << 20


class _FloatLayout(NamedTuple):
    """How a little-endian float is stored: its bytes, array type, exponent bits, and the pattern of 1.0."""

    size: int
    code: str
    exponent: int
    one: bytes

    @property
    def top_bytes(self) -> bytes:
        """The values which the highest byte of an infinity or NaN can have."""
        mask = self.exponent >> 8 * (self.size - 1)
        return bytes(value for value in range(256) if value & mask == mask)


_LAYOUTS = {
    "BF16": _FloatLayout(2, "H", 0x7F80, b"\x80\x3f"),
    "F16": _FloatLayout(2, "H", 0x7C00, b"\x00\x3c"),
    "F32": _FloatLayout(4, "I", 0x7F800000, b"\x00\x00\x80\x3f"),
}


def number_faults(headers: Mapping[str, TensorHeader]) -> Iterator[Fault]:
    """Yield the faults that stored numbers show: one per tensor, and one for all norms that are ones."""
    ones = []
    norms = sorted(name for name in headers if is_norm(name))
    for name, header in headers.items():
        layout = _LAYOUTS.get(header.dtype)
        if layout is None or header.start == header.end:
            continue
        finite, zero, one = _scan(header, layout, look_for_ones=name in norms)
        if not finite:
            yield fault("not-finite", f"{name} holds NaN or infinity; train or convert it again")
        elif zero and not name.endswith(".bias"):
            yield fault("all-zero", f"{name} is zero everywhere; was it ever written?")
        if one:
            ones.append(name)
    if ones:
        text = f"{len(ones)} of {len(norms)} norm weights are exactly 1 everywhere ({', '.join(sorted(ones))})"
        yield fault("norms-all-ones", f"{text}; they were not trained, or kept in bfloat16 where small steps are lost")


def constant_faults(headers: Mapping[str, TensorHeader]) -> Iterator[Fault]:
    """Yield a fault per weight whose numbers are all the same; `number_faults` has those of zeros and ones already."""
    for name, header in headers.items():
        layout = _LAYOUTS.get(header.dtype)
        if layout is None or header.end - header.start <= layout.size or name.endswith(".bias"):
            continue
        value = _constant(header, layout)
        ones = value == layout.one and is_norm(name)
        if value is not None and any(value) and not ones:
            yield fault("constant", f"{name} holds one number {list(header.shape)} times over; was it ever trained?")


def _constant(header: TensorHeader, layout: _FloatLayout) -> bytes | None:
    """The stored form of the one number that a tensor holds; None where it holds several. Ends at the second."""
    with header.file.open("rb") as stream:
        stream.seek(header.start)
        value = stream.read(layout.size)
        left = header.end - header.start - layout.size
        while left:
            chunk = stream.read(min(_CHUNK, left))
            if not chunk or chunk != value * (len(chunk) // layout.size):
                return None
            left -= len(chunk)
    return value


def is_norm(name: str) -> bool:
    """Whether a tensor name is that of a norm's gain; MLPSpeculators call theirs `ln`."""
    parts = name.split(".")
    return parts[-1] == "weight" and any(part.endswith("norm") or part == "ln" for part in parts[-3:-1])


_INTEGER_CODES = {"I64": "q", "I32": "i"}


def read_integers(header: TensorHeader) -> list[int]:
    """Return the numbers of an I64 or I32 tensor."""
    with header.file.open("rb") as stream:
        stream.seek(header.start)
        numbers = array(_INTEGER_CODES[header.dtype], stream.read(header.end - header.start))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def read_marked(header: TensorHeader) -> list[int]:
    """Return the positions at which a BOOL tensor is true, ascending."""
    with header.file.open("rb") as stream:
        stream.seek(header.start)
        return [index for index, value in enumerate(stream.read(header.end - header.start)) if value]


def _scan(header: TensorHeader, layout: _FloatLayout, *, look_for_ones: bool) -> tuple[bool, bool, bool]:
    """Return whether a float tensor is finite, all zero, and (where asked) all ones; reads it once, in pieces."""
    finite, zero, one = True, True, look_for_ones
    suspicious = layout.top_bytes
    with header.file.open("rb") as stream:
        stream.seek(header.start)
        left = header.end - header.start
        while left:
            chunk = stream.read(min(_CHUNK, left))
            if not chunk:
                break
            left -= len(chunk)
            zero = zero and chunk.count(0) == len(chunk)
            one = one and chunk == layout.one * (len(chunk) // layout.size)
            top = chunk[layout.size - 1 :: layout.size]
            if any(byte in top for byte in suspicious):
                finite = finite and _all_finite(chunk, layout)
    return finite, zero, one


def _all_finite(chunk: bytes, layout: _FloatLayout) -> bool:
    bits = array(layout.code, chunk)
    if sys.byteorder == "big":
        bits.byteswap()
    return all(value & layout.exponent != layout.exponent for value in bits)
