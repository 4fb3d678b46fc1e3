"""Heads and blocks that cannot be converted are refused by what is wrong with them, and leave no directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.formats.verifier_weights import load_verifier_weights
from tests.convert import layouts_native as layouts
from tests.convert.converting import converted
from tests.convert.foreign import Drawn, ForeignCheckpoint
from tests.convert.test_from_native import Make

Change = Callable[[ForeignCheckpoint], Any]
HEAD, STEP = "0.0.linear.weight", "speculator.proj.1.weight"


def without(name: str) -> Change:
    """A tensor less."""
    return lambda case: case.tensors.pop(name)


def extra(name: str, shape: tuple[int, ...] = (4, 4)) -> Change:
    """A tensor more."""
    return lambda case: case.tensors.update({name: torch.ones(shape)})


def renamed(old: str, new: str) -> Change:
    """A tensor under another name."""
    return lambda case: case.tensors.update({new: case.tensors.pop(old)})


def reshaped(name: str, rows: int) -> Change:
    """A tensor with fewer rows."""
    return lambda case: case.tensors.update({name: case.tensors[name][:rows].clone()})


def says(**keys: Any) -> Change:
    """Other words in the configuration."""
    return lambda case: case.config.update(keys)


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Other numbers."""
    return lambda case: case.tensors.update({name: change(case.tensors[name])})


HEADS: list[tuple[Make, Change, str]] = [
    (layouts.medusa, without(HEAD), r"blocks\.0\.layers\.0\.weight is missing; the heads have to be alike"),
    (layouts.medusa, without("1.0.linear.bias"), r"blocks\.1\.layers\.0\.bias is missing"),
    (layouts.medusa, without("2.1.weight"), r"lm_heads\.2\.weight is missing"),
    (layouts.medusa, renamed(HEAD, "0.0.lin.weight"), "is missing"),
    (layouts.medusa, extra("0.norm.weight"), r"0\.norm\.weight \[4, 4\] has no place in a medusa speculator"),
    (layouts.medusa, reshaped("1.0.linear.weight", 32), r"has shape \[32, 64\]; expected \[64, 64\]"),
    (layouts.medusa, reshaped(HEAD, 32), "a layer is .*: is it this verifier's draft"),
    (layouts.medusa, reshaped("0.1.weight", 100), "no token_map says which"),
    (layouts.medusa, with_tensor("0.1.weight", lambda value: torch.cat((value, value))), "768 rows.*has 384 tokens"),
    (layouts.medusa, says(medusa_num_heads=4), "the configuration says 4 heads; the tensors have 3"),
    (layouts.medusa, says(medusa_num_heads="3"), "medusa_num_heads is '3'; expected a whole number"),
    (layouts.medusa, says(medusa_num_layers=2), r"the configuration says 2 layers a head; the tensors have 1"),
    (layouts.medusa, says(logit_scale=0.5), "logit_scale is 0.5"),
    (layouts.medusa, says(medusa_fc_bias=False), "medusa_fc_bias is False; by the tensors it is True"),
    (layouts.medusa, extra("medusa_heads.0.0.linear.weight", (64, 64)), "are both blocks.0.layers.0.weight"),
    (layouts.medusa_two_layers, without("2.1.linear.weight"), r"blocks\.2\.layers\.1\.weight is missing"),
    (layouts.medusa_two_layers, renamed("0.2.weight", "0.3.weight"), r"output matrices have the numbers \[2, 3\]"),
    (
        layouts.medusa_one_copy,
        says(medusa_num_layers=2),
        r"output matrices have the numbers \[3\] and each head 1 layers",
    ),
    (layouts.vllm_medusa, without("token_map"), "no token_map says which"),
    (
        layouts.vllm_medusa,
        with_tensor("token_map", lambda ids: ids.fill_(3)),
        "token_map starts .*expected each id once",
    ),
    (layouts.vllm_medusa, with_tensor("token_map", lambda ids: ids + 384), "token_map starts .*within 0..383"),
    (
        layouts.vllm_medusa,
        with_tensor("token_map", lambda ids: ids[:-1]),
        r"token_map is I32 \[89\]; expected an id for",
    ),
    (layouts.vllm_medusa, says(truncated_vocab_size=91), "truncated_vocab_size is 91; the heads have 90 tokens"),
    (layouts.accelerator, without(STEP), r"proj\.1\.weight is missing"),
    (layouts.accelerator, without("speculator.ln.2.bias"), r"ln\.2\.bias is missing"),
    (layouts.accelerator, renamed(STEP, "speculator.proj.7.weight"), "has no place in a mlp_speculator speculator"),
    (layouts.accelerator, extra("speculator.emb.3.weight"), r"emb\.3\.weight \[4, 4\] has no place"),
    (layouts.accelerator, reshaped("speculator.head.0.weight", 300), r"has shape \[300, 40\]; expected \[384, 40\]"),
    (layouts.accelerator, says(inner_dim=0), r"expected \[384, 64\]"),
    (layouts.accelerator, says(n_predict=2, top_k_tokens_per_head=[4, 3]), r"emb\.2\.weight \[384, 40\] has no place"),
    (layouts.accelerator, says(n_predict=2), "top_k_tokens_per_head has 3 entries; n_predict is 2"),
    (layouts.accelerator, says(n_predict=10**15, top_k_tokens_per_head=None), "n_predict is 10{15}; expected at most"),
    (
        layouts.medusa,
        lambda case: (
            [renamed(f"{head}.1.weight", f"{head}.{10**15}.weight")(case) for head in range(3)],
            says(medusa_num_layers=10**15)(case),
        ),
        "output matrices have the numbers .10{15}.",
    ),
    (layouts.accelerator, says(n_predict=None), "n_predict is None; expected a whole number above 0"),
    (layouts.accelerator, says(tie_weights=True), r"emb\.1\.weight differs from emb\.0\.weight although tie_weights"),
    (layouts.accelerator, says(vocab_size=400), "vocab_size is 400; that of .* is 384: is it this verifier's draft"),
    (layouts.accelerator, says(emb_dim=32), "emb_dim is 32; that of .* is 64"),
    (layouts.accelerator, says(method="sum_lstm"), r"is an Arctic speculator \(sum_lstm\)"),
    (
        layouts.accelerator,
        says(architectures=["ArcticLSTMSpeculatorPreTrainedModel"], model_type="arctic"),
        "is an Arctic speculator .*whose recurrence is gated",
    ),
    (layouts.accelerator, extra("forget_emb.0.weight"), r"is an Arctic speculator \(forget_emb\.0\.weight\)"),
    (layouts.accelerator_tied_once, says(tie_weights=False), r"emb\.1\.weight is missing"),
    (
        layouts.accelerator_tied,
        with_tensor("speculator.ln.2.bias", lambda bias: bias + 1),
        r"ln\.2\.bias differs from ln\.0\.bias although tie_weights is true",
    ),
]


@pytest.mark.parametrize(("make", "change", "message"), HEADS)
def test_a_head_that_is_not_whole_is_refused(
    make: Make, change: Change, message: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    change(case)
    with pytest.raises(SpeculatorsError, match=message):
        converted(case, tmp_path, tiny_verifier)
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


LAYER = "model.layers.4."
BLOCKS: list[tuple[str, Change, str]] = [
    ("qwen3_5", without("mtp.fc.weight"), r"mtp\.fc\.weight is missing; expected a whole MTP block"),
    ("qwen3_5", without("mtp.layers.0.self_attn.q_norm.weight"), r"self_attn\.q_norm\.weight is missing"),
    ("qwen3_5", renamed("mtp.norm.weight", "mtp.last.weight"), r"mtp\.last\.weight is no part of an MTP block"),
    ("qwen3_5", extra("mtp.layers.0.self_attn.sinks", (4,)), r"self_attn\.sinks belongs to no part of the draft"),
    ("qwen3_5", extra("mtp.layers.1.mlp.up_proj.weight"), r"mtp\. is followed by mtp\.layers\.1\."),
    ("qwen3_5", reshaped("mtp.fc.weight", 20), r"input_proj\.weight has shape \[20, 64\]; expected \[32, 64\]"),
    ("qwen3_next", without("mtp.layers.0.mlp.experts.3.up_proj.weight"), r"experts\.3\.up_proj\.weight is missing"),
    ("qwen3_next", reshaped("mtp.layers.0.mlp.experts.3.up_proj.weight", 8), "experts of .*expected them alike"),
    ("glm", without(f"{LAYER}mlp.gate.e_score_correction_bias"), "e_score_correction_bias is missing"),
    (
        "glm",
        with_tensor(f"{LAYER}embed_tokens.weight", lambda value: value + 1),
        "embed_tokens.weight is another than the verifier's embed_tokens, which a draft here shares with it",
    ),
    (
        "glm",
        with_tensor(f"{LAYER}shared_head.head.weight", lambda value: value + 1),
        "shared_head.head.weight is another than the verifier's lm_head",
    ),
    ("mimo", reshaped("model.mtp_layers.0.input_proj.weight", 20), r"input_proj\.weight has shape \[20, 64\]"),
    (
        "glm",
        says(intermediate_size=49),
        r"intermediate_size is 49, and model\.layers\.0\.mlp\.up_proj\.weight is \[48, 32\]",
    ),
    ("mimo", says(fc_norm=True), "fc_norm is True, which no MTP block has"),
    ("mimo", without("model.layers.2.mlp.up_proj.weight"), "num_hidden_layers is 4; layer 2 is missing"),
    ("mimo", says(num_hidden_layers=10**15), "num_hidden_layers is 10{15} beside the block and 4 in"),
    ("mimo", extra("model.layers.4.mlp.up_proj.weight", (48, 32)), "num_hidden_layers is 4; layer 4 is there besides"),
    ("mimo", says(num_speculative_steps="three"), "num_speculative_steps is 'three'; expected a whole number"),
    ("deepseek-float8", without(f"{LAYER}self_attn.o_proj.weight_scale_inv"), "is stored in 8 bits without a scale"),
    ("deepseek-float8", without(f"{LAYER}self_attn.o_proj.weight"), "scales .*o_proj.weight, which is missing"),
    (
        "deepseek-float8",
        reshaped(f"{LAYER}self_attn.o_proj.weight_scale_inv", 1),
        r"expected one scale, one a row, or one for each block of \[16, 16\]",
    ),
    (
        "deepseek-float8",
        says(quantization_config={"weight_block_size": 16}),
        "weight_block_size is 16; expected two whole numbers",
    ),
]


@pytest.mark.parametrize(("style", "change", "message"), BLOCKS)
def test_a_block_that_is_not_whole_is_refused(style: str, change: Change, message: str, tmp_path: Path) -> None:
    """The verifier that is given is whole; the checkpoint that is read is not."""
    case = layouts.MTP_CASES[style]()
    verifier = case.write(tmp_path / "verifier")
    change(case)
    with pytest.raises(SpeculatorsError, match=message):
        converted(case, tmp_path, verifier)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "verifier"]


def test_more_layers_than_a_checkpoint_has_are_refused_at_once(tmp_path: Path) -> None:
    case = layouts.MTP_CASES["mimo"]()
    says(num_hidden_layers=10**15)(case)
    verifier = case.write(tmp_path / "verifier")
    with pytest.raises(SpeculatorsError, match=r"num_hidden_layers is 10{15}; layer 4 is missing"):
        converted(case, tmp_path, verifier)


def test_another_verifiers_block_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    message = "model_type is 'mimo' beside the block and 'llama' in .*: is it this verifier's block"
    with pytest.raises(SpeculatorsError, match=message):
        converted(layouts.MTP_CASES["mimo"](), tmp_path, tiny_verifier)


def test_heads_saved_with_another_model_are_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    """Medusa-2 trains the model with its heads, which are worth nothing with the one that it began with."""
    case = layouts.medusa_whole_model()
    weights = load_verifier_weights(tiny_verifier)
    case.tensors |= {
        "model.embed_tokens.weight": weights.embed_tokens.clone(),
        "lm_head.weight": weights.lm_head.clone(),
    }
    plan = converted(case, tmp_path / "same", tiny_verifier).plan
    reason = "a weight of the model that the heads were saved with, which is the verifier"
    assert plan.dropped["model.embed_tokens.weight"] == plan.dropped["lm_head.weight"] == reason
    case.tensors["lm_head.weight"] = Drawn(1).matrix(layouts.VOCAB, layouts.WIDTH)
    with pytest.raises(
        SpeculatorsError, match=r"lm_head\.weight is another than the lm_head of .*give that as the verif"
    ):
        converted(case, tmp_path / "other", tiny_verifier)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (layouts.medusa, {"aux_layer_ids": [1]}, "aux_layer_ids cannot be given for Medusa heads; expected"),
        (layouts.medusa, {"speculative_tokens": 4}, "speculative_tokens is 4 but medusa_num_heads is 3"),
        (layouts.accelerator, {"mask_token_id": 1}, "mask_token_id cannot be given for an MLP speculator"),
        (layouts.MTP_CASES["mimo"], {"block_size": 4}, "block_size cannot be given for an MTP block"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    make: Make, options: dict[str, Any], message: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    case.options = options
    with pytest.raises(SpeculatorsError, match=message):
        converted(case, tmp_path, tiny_verifier)
