"""Tensors of native MTP blocks, against transformers' own MTP layer, and back bit by bit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from speculators.errors import FormatError
from speculators.formats.mtp_names import Change, Origin, deepseek_layout, find_layout, mimo_layout, qwen_layout
from speculators.models.mtp.block import LAYER_CLASSES
from speculators.models.mtp.model import MtpModel, MtpSteps
from speculators.models.mtp.native import from_native, to_native
from tests.models.drafts import HIDDEN, VOCAB, random_speculator
from tests.models.mtp.contract import of_style
from tests.models.mtp.test_block import speculator_of
from tests.models.mtp.test_layer_config import config_of
from tests.models.mtp.verifiers import RAW

LAYOUTS = {
    "mimo": mimo_layout(),
    "qwen3_next": qwen_layout(),
    "qwen3_next_dense": qwen_layout(),
    "qwen3_5": qwen_layout(),
    "qwen3_5_moe": qwen_layout(),
    "deepseek": deepseek_layout(4),
    "deepseek_dense": deepseek_layout(4),
    "glm": deepseek_layout(4),
}


@pytest.mark.parametrize("style", LAYOUTS)
@pytest.mark.parametrize("fused", [True, False])
def test_a_block_is_written_and_read_back_bit_by_bit(style: str, fused: bool) -> None:
    """A block's native tensors are mapped, all of them (pitfall 37)."""
    speculator = speculator_of(style)
    experts = speculator.config.transformer_layer_config.num_routed_experts
    ours = {name: tensor for name, tensor in speculator.draft.state_dict().items() if name.startswith("mtp_layers.")}
    native = to_native(LAYOUTS[style].native_origins(ours, 0 if fused else experts), ours)
    assert len(native) == len(ours) + (0 if fused or not experts else 3 * experts - 2)
    layout = find_layout(native, 4)
    assert layout == LAYOUTS[style]
    again = from_native(layout.origins(native), native.__getitem__)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def native_layer(style: str) -> tuple[Any, MtpLayer, dict[str, Tensor]]:
    """A random MTP layer of transformers, its rotary module, and its tensors as a checkpoint names them."""
    classes = LAYER_CLASSES[RAW[style]["model_type"]]
    raw = {key: value for key, value in RAW[style].items() if key not in ("quantization_config", "auto_map")}
    config = classes.config(**raw, attn_implementation="eager")
    layer = MtpLayer(config, classes.layer, classes.norm, 3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for tensor in layer.state_dict().values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    prefix, native = "model.layers.4.", {}
    for name, tensor in layer.state_dict().items():
        inner = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if inner == "mlp.experts.gate_up_proj":
            for index, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                native[f"{prefix}mlp.experts.{index}.gate_proj.weight"] = gate
                native[f"{prefix}mlp.experts.{index}.up_proj.weight"] = up
        elif inner == "mlp.experts.down_proj":
            native |= {f"{prefix}mlp.experts.{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            native[prefix + inner] = tensor
    return classes.rotary(config), layer.eval(), native


@pytest.mark.parametrize("style", ["deepseek", "glm"])
def test_native_tensors_compute_what_transformers_computes_with_them(style: str) -> None:
    """A block's native tensors are mapped, all of them (pitfall 37)."""
    rotary, layer, native = native_layer(style)
    model = MtpModel(config_of(style))
    tensors = from_native(find_layout(native, 4).origins(native), native.__getitem__)
    embeds = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))
    missing = model.load_state_dict({**tensors, "embed_tokens.weight": embeds}, strict=False, assign=True)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    ids, states = torch.arange(9), torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(7))
    positions = torch.arange(9)
    # Engines embed nothing at position 0 of these verifiers.
    inputs = embeds[ids] * (positions > 0)[:, None]
    mask = torch.zeros(9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), torch.finfo(torch.float32).min)
    expected = layer(
        inputs[None],
        states[None],
        position_embeddings=rotary(states[None], positions[None]),
        attention_mask=mask[None, None],
        position_ids=positions[None],
        cache=None,
    )
    (found,) = model(MtpSteps(states, positions, ids[None], [9]))
    torch.testing.assert_close(found, expected[0], atol=2e-5, rtol=1e-4)


def test_mimos_projection_reads_the_state_first() -> None:
    """W [h; e] of the file is W' [e; h] of ours."""
    native = torch.randn(HIDDEN, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    (swapped,) = from_native({"x": Origin(Change.SWAP_HALVES, ("w",))}, {"w": native}.__getitem__).values()
    embedding, state = torch.randn(HIDDEN), torch.randn(HIDDEN)
    expected = native @ torch.cat((state, embedding))
    torch.testing.assert_close(swapped @ torch.cat((embedding, state)), expected, atol=1e-5, rtol=1e-5)


def test_tensors_that_do_not_fit_are_named() -> None:
    experts = {"a": torch.zeros(3, 2), "b": torch.zeros(4, 2)}
    with pytest.raises(FormatError, match=r"experts of x have shapes \[3, 2\] and \[4, 2\]"):
        from_native({"x": Origin(Change.STACK, ("a", "b"))}, experts.__getitem__)
    with pytest.raises(FormatError, match=r"x has shape \[2, 3\]; expected a matrix of as many columns"):
        from_native({"x": Origin(Change.SWAP_HALVES, ("a",))}, {"a": torch.zeros(2, 3)}.__getitem__)
    ours = random_speculator("mtp", **of_style("qwen3_next")).draft.state_dict()
    layer = {name: tensor for name, tensor in ours.items() if name.startswith("mtp_layers.")}
    with pytest.raises(FormatError, match="expected 5 experts"):
        to_native(qwen_layout().native_origins(layer, 5), layer)
