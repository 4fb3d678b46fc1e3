"""DFlash 2 drafts as z-lab writes them: DFlash's layout, with convolutions in its layers and a candidate selector."""

from __future__ import annotations

from speculators.convert.from_dflash import OPTIONS, BlockReader
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.plan import CheckpointPlan
from speculators.convert.source import SourceCheckpoint
from speculators.formats.faults import error_of, fault
from speculators.models.dflash2.config import DFlash2Config

_KERNEL, _PROJECTION = "layers.0.attention_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight"
_CODEBOOK = "candidate_selector.predecessor_codebook"


def plan(source: SourceCheckpoint, verifier: ConversionVerifier, options: ConvertOptions) -> CheckpointPlan:
    """Account for a DFlash 2 draft's tensors; FormatError names what it cannot be converted for.

    Sizes that the configuration does not write are those of the tensors; `selector_top_k` is in none.
    """
    options.require_only("a DFlash 2 draft", *OPTIONS)
    reader = BlockReader(source, verifier, options)
    settings, shape = reader.settings, reader.ledger.source.shape
    kernel, projection, codebook = (
        _sizes(shape(name), name, count) for name, count in ((_KERNEL, 3), (_PROJECTION, 2), (_CODEBOOK, 2))
    )
    groups = max(1, projection[0] // (2 * kernel[1]))
    return reader.finish(
        DFlash2Config,
        "dflash2",
        sliding_window_non_causal=reader.sees_later_slots(),
        conv_kernel_size=settings.count("conv_kernel_size", least=1) or kernel[1],
        conv_group_size=settings.count("conv_group_size", least=1) or reader.layer.hidden_size // groups,
        selector_rank=settings.count("selector_rank", least=1) or codebook[1],
        selector_top_k=settings.required(None, "selector_top_k", least=1),
    )


def _sizes(shape: tuple[int, ...] | None, name: str, count: int) -> tuple[int, ...]:
    if shape is None or len(shape) != count or 0 in shape:
        text = f"{name} is {'missing' if shape is None else list(shape)}; expected {count} sizes"
        raise error_of([fault("missing-tensor" if shape is None else "tensor-shape", text)], "checkpoint")
    return shape
