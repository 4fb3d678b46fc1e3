"""Files beside the weights that were read: none that may hold weights is passed over in silence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from speculators.convert.source import TRAINING_STATE, SourceTensor, tensors_of
from speculators.errors import FormatError
from speculators.formats.checkpoint import read_json_object
from speculators.formats.faults import error_of, fault

QUANTISATION = "hf_quant_config.json"
_ADAPTER = re.compile(r"adapter_model\.\w+")


def account_for_files(
    folder: Path, left: Iterable[Path], read: Mapping[str, SourceTensor], named: str | None
) -> dict[str, str]:
    """Why each of the files that a layout has not taken is left out, by name.

    `read` are the tensors that were read, `named` the weight file that the user chose, if any. FormatError where a file
    may hold something that the draft needs.
    """
    reasons, unknown = {}, []
    for file in left:
        reason = _reason(file, read, named)
        if reason is None:
            unknown.append(file.name)
        else:
            reasons[file.name] = reason
    if unknown:
        text = f"{', '.join(unknown)} would be left out unread; name the one file of weights that counts, or remove"
        raise error_of([fault("stray-weights", f"{text} {'it' if len(unknown) == 1 else 'them'}")], folder)
    return reasons


def _reason(file: Path, read: Mapping[str, SourceTensor], named: str | None) -> str | None:
    if file.name == QUANTISATION:
        return _unquantised(file)
    if TRAINING_STATE.fullmatch(file.name):
        return "the state of a training run, no weights of the draft"
    if _ADAPTER.fullmatch(file.name):
        return "an adapter of the verifier; the draft was trained beside it, and accepts less without it"
    if named is not None:
        return f"{named} was named as the file of weights"
    # What a layout has renamed is still called in its file as it was.
    ours = {(tensor.name, tensor.shape) for tensor in read.values()}
    try:
        theirs = {(tensor.name, tensor.shape) for tensor in tensors_of(file)}
    except FormatError:
        return None
    return "the same tensors once more, in another container" if theirs <= ours else None


def _unquantised(file: Path) -> str:
    try:
        content = read_json_object(file)
    except (ValueError, OSError) as error:
        raise FormatError(f"{file} is unreadable ({error}); fetch it again") from error
    block = content.get("quantization")
    algorithm = block.get("quant_algo") if isinstance(block, dict) else content.get("quant_algo")
    if algorithm is not None:
        raise FormatError(
            f"{file}: the weights are quantised by {algorithm}, which this layout is not read in; convert the draft "
            "as it was before it was quantised"
        )
    return "says that nothing is quantised"
