"""Which dtype a converted checkpoint is stored in: one for all its float tensors."""

from __future__ import annotations

from collections.abc import Collection

from speculators.convert.plan import Ledger
from speculators.errors import FormatError
from speculators.formats.checkpoint import DTYPE_NAMES
from speculators.formats.config import Dtype

# By its name in a configuration, what a dtype is called in safetensors files.
STORED_AS_DTYPE: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_WIDE = ("F64", *DTYPE_NAMES)


def settle_dtype(ledger: Ledger, asked: Dtype | None = None, exact: Collection[str] = ()) -> Dtype:
    """Give all planned float tensors one dtype and return it: `asked`, else the narrowest that holds them all.

    A note says what is brought to another dtype. Tensors in `exact` have float32 whatever the others have. FormatError
    where a float is stored in some other way than as float32, bfloat16 or float16, or none is.
    """
    for name in exact:
        if name in ledger.planned:
            ledger.planned[name] = ledger.planned[name].stored_as("F32")
    planned = {name: tensor for name, tensor in ledger.planned.items() if name not in exact}
    floats = {name: tensor for name, tensor in planned.items() if tensor.dtype in _WIDE}
    found = {tensor.dtype for tensor in floats.values()}
    if not found:
        raise FormatError(f"{ledger.source.directory} has no float tensor; expected {', '.join(STORED_AS_DTYPE)}")
    if "F64" in found and asked is None:
        raise FormatError(f"{ledger.source.directory} has float64 tensors, which no draft is stored in; give a dtype")
    # Neither half-precision format holds the numbers of the other.
    common = next(iter(found)) if len(found) == 1 else "F32"
    target = common if asked is None else STORED_AS_DTYPE[asked]
    for name, tensor in floats.items():
        if tensor.dtype != target:
            ledger.planned[name] = tensor.stored_as(target)
    changed = sorted(DTYPE_NAMES.get(dtype, "float64") for dtype in found - {target})
    settled = next(dtype for dtype, stored in STORED_AS_DTYPE.items() if stored == target)
    if changed:
        how = "without loss" if asked is None else "as asked for"
        ledger.note(f"tensors stored in {' and '.join(changed)} are written in {settled}, {how}")
    return settled
