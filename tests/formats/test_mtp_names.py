"""Native names of MTP blocks, both directions, for every layout."""

import subprocess
import sys

import pytest

from speculators.errors import FormatError
from speculators.formats.mtp_names import (
    Change,
    NativeLayout,
    Origin,
    deepseek_layout,
    find_layout,
    mimo_layout,
    qwen_layout,
)

LAYER = [
    "self_attn.q_proj.weight",
    "self_attn.o_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
]
DENSE = [*LAYER, "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"]
FUSED = [*LAYER, "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
AROUND = ["token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"]
QWEN = {"mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"}
DEEPSEEK = {f"model.layers.61.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
MIMO = {f"model.mtp_layers.0.{name}" for name in AROUND}
LAYOUTS = {
    "qwen": (qwen_layout(), QWEN, "mtp.layers.0."),
    "deepseek": (deepseek_layout(61), DEEPSEEK, "model.layers.61."),
    "mimo": (mimo_layout(), MIMO, "model.mtp_layers.0."),
}


def experts(prefix: str, count: int) -> set[str]:
    return {f"{prefix}mlp.experts.{e}.{kind}_proj.weight" for e in range(count) for kind in ("gate", "up", "down")}


def ours(names: list[str]) -> set[str]:
    return {f"mtp_layers.0.{name}" for name in names}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_block(name: str) -> None:
    """A block's native tensors are mapped, all of them (pitfall 37)."""
    layout, around, prefix = LAYOUTS[name]
    native = around | {prefix + inner for inner in DENSE}
    origins = layout.origins([*native, "model.layers.6.input_layernorm.weight", "lm_head.weight"])
    assert origins.keys() == ours([*AROUND, *DENSE])
    assert {origin.names[0] for origin in origins.values()} == native
    swapped = {ours for ours, origin in origins.items() if origin.change is Change.SWAP_HALVES}
    assert swapped == ({"mtp_layers.0.input_proj.weight"} if name == "mimo" else set())
    assert layout.native_origins(origins) == origins


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_one_by_one_become_two_tensors(name: str) -> None:
    layout, around, prefix = LAYOUTS[name]
    native = around | {prefix + inner for inner in LAYER} | {f"{prefix}mlp.gate.weight"} | experts(prefix, 11)
    origins = layout.origins(native)
    assert origins.keys() == ours([*AROUND, *FUSED])
    pairs = origins["mtp_layers.0.mlp.experts.gate_up_proj"]
    assert pairs.change is Change.STACK_PAIRS
    # By number, not by spelling: 10 comes last.
    assert pairs.names[:3] == tuple(
        f"{prefix}mlp.experts.{inner}_proj.weight" for inner in ("0.gate", "0.up", "1.gate")
    )
    assert pairs.names[-1] == f"{prefix}mlp.experts.10.up_proj.weight"
    downs = origins["mtp_layers.0.mlp.experts.down_proj"]
    assert downs == Origin(Change.STACK, tuple(f"{prefix}mlp.experts.{e}.down_proj.weight" for e in range(11)))
    assert layout.native_origins(origins, 11) == origins
    assert {part for origin in origins.values() for part in origin.names} == native


def test_fused_experts_stay_fused() -> None:
    layout, around, prefix = LAYOUTS["qwen"]
    origins = layout.origins(around | {prefix + inner for inner in FUSED})
    assert origins["mtp_layers.0.mlp.experts.down_proj"] == Origin(Change.COPY, ("mtp.layers.0.mlp.experts.down_proj",))
    assert layout.native_origins(origins) == origins


def test_where_each_of_the_modules_around_the_layer_comes_from() -> None:
    """The roles that vLLM's loaders give them."""
    names = {inner: layout.native_origins(ours([inner])) for inner in AROUND for layout in [qwen_layout()]}
    assert [names[inner][f"mtp_layers.0.{inner}"].names[0] for inner in AROUND] == [
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.fc.weight",
        "mtp.norm.weight",
    ]
    deepseek = deepseek_layout(46).native_origins(ours(AROUND))
    assert [deepseek[f"mtp_layers.0.{inner}"].names[0] for inner in AROUND] == [
        "model.layers.46.enorm.weight",
        "model.layers.46.hnorm.weight",
        "model.layers.46.eh_proj.weight",
        "model.layers.46.shared_head.norm.weight",
    ]


def test_copies_of_the_verifiers_tensors_are_left_out_and_named() -> None:
    layout, around, prefix = LAYOUTS["deepseek"]
    copies = {f"{prefix}embed_tokens.weight": "embed_tokens", f"{prefix}shared_head.head.weight": "lm_head"}
    native = around | {prefix + inner for inner in DENSE} | copies.keys()
    assert layout.origins(native).keys() == ours([*AROUND, *DENSE])
    assert layout.repeats(native) == copies


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_is_found_among_all_names(name: str) -> None:
    layout, around, _ = LAYOUTS[name]
    body = {f"model.layers.{index}.input_layernorm.weight" for index in range(61)} | {"model.embed_tokens.weight"}
    assert find_layout(body, 61) is None
    assert find_layout(body | around, 61) == layout
    second = {"qwen": "mtp.layers.1.", "deepseek": "model.layers.62.", "mimo": "model.mtp_layers.1."}[name]
    with pytest.raises(FormatError, match="expected one MTP block"):
        find_layout(body | around | {second + LAYER[0]}, 61)


def faulty(layout: NativeLayout, names: set[str]) -> str:
    with pytest.raises(FormatError) as caught:
        layout.origins(names)
    return str(caught.value)


def test_what_is_not_understood_or_not_there_is_named() -> None:
    layout, around, prefix = LAYOUTS["deepseek"]
    whole = around | {prefix + inner for inner in DENSE}
    assert "model.layers.61.enorm.weight is missing" in faulty(layout, whole - {f"{prefix}enorm.weight"})
    scale = f"{prefix}self_attn.q_proj.weight_scale_inv"
    assert "dequantise them first" in faulty(layout, whole | {scale})
    assert "indexer.weight is no part" in faulty(layout, whole | {f"{prefix}indexer.weight"})
    lacking = (whole | experts(prefix, 3)) - {f"{prefix}mlp.experts.1.up_proj.weight"}
    assert "experts.1.up_proj.weight is missing; expected every projection of 3 experts" in faulty(layout, lacking)
    assert "experts.0.w1.weight is no part" in faulty(layout, whole | {f"{prefix}mlp.experts.0.w1.weight"})
    with pytest.raises(FormatError, match=r"lm_head\.weight does not begin with mtp_layers\.0\."):
        layout.native_origins(["lm_head.weight"])


def test_names_are_handled_without_torch() -> None:
    code = "import sys, speculators.formats.mtp_names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
