"""The convolutions of DFlash 2 against loops, and the walk over candidates."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.dflash2.config import DFlash2Config
from speculators.models.dflash2.model import DFlash2Layer, DFlash2Model, GroupedDynamicCausalConv
from speculators.models.draft_model import DraftContext
from speculators.models.proposing import Drafts
from speculators.models.speculator import Speculator
from speculators.train.config import TrainConfig
from speculators.train.optim import build_optimizers
from tests.models.drafts import pack, random_speculator

OPTIONS = {"block_size": 4, "num_layers": 2, "draft_vocab_size": None, "selector_rank": 8, "selector_top_k": 5}


def speculator_of(**options) -> Speculator:
    return random_speculator("dflash2", **OPTIONS | options)


def config_of(**options) -> DFlash2Config:
    config = speculator_of(**options).config
    assert isinstance(config, DFlash2Config)
    return config


def random_conv(**options) -> GroupedDynamicCausalConv:
    conv = GroupedDynamicCausalConv(config_of(**options))
    for parameter in conv.parameters():
        torch.nn.init.normal_(parameter)
    return conv


def convolved(conv: GroupedDynamicCausalConv, states_SH: Tensor, inputs_SH: Tensor, side: int) -> Tensor:
    """out[s, h] = sum over taps t <= s of (base[side, t, h] + correction[s, side, t, h // g]) * in[s - t, h]."""
    slots, hidden = inputs_SH.shape
    taps, groups = conv.base_kernel.shape[1], hidden // conv.group_size
    rows = conv.kernel_projection.weight
    out = torch.zeros(slots, hidden)
    for slot in range(slots):
        for channel in range(hidden):
            for tap in range(min(taps, slot + 1)):
                row = (side * taps + tap) * groups + channel // conv.group_size
                kernel = conv.base_kernel[side, tap, channel] + rows[row] @ states_SH[slot]
                out[slot, channel] += kernel * inputs_SH[slot - tap, channel]
    return out


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("taps", "group"), [(1, 32), (2, 16), (3, 8), (6, 16)])
@torch.no_grad()
def test_a_convolution_is_the_sum_over_taps_within_its_block(side: int, taps: int, group: int) -> None:
    """Also with more taps than slots; the second block does not see the first."""
    conv = random_conv(conv_kernel_size=taps, conv_group_size=group)
    states_ASH, inputs_ASH = torch.randn(2, 2, 4, 32)
    found = conv(inputs_ASH, side, conv.corrections(states_ASH)[side])
    for block in range(2):
        expected = convolved(conv, states_ASH[block], inputs_ASH[block], side)
        torch.testing.assert_close(found[block], expected, atol=1e-4, rtol=1e-4)


def test_a_fresh_convolution_is_the_identity_but_can_learn() -> None:
    conv = GroupedDynamicCausalConv(config_of(conv_kernel_size=3))
    states, inputs = torch.randn(2, 1, 4, 32)
    before, after = conv.corrections(states)
    torch.testing.assert_close(conv(inputs, 0, before), inputs)
    torch.testing.assert_close(conv(inputs, 1, after), inputs)
    (conv(inputs, 0, before).square().sum() + conv(inputs, 1, after).square().sum()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in conv.parameters())


@torch.no_grad()
def test_a_layer_convolves_before_and_after_attention_and_mlp_by_the_same_state() -> None:
    draft = speculator_of().draft
    layer = draft.layers[0]
    assert isinstance(layer, DFlash2Layer)
    hidden_ASH = torch.randn(2, 4, 32)

    def attended(states_ASH: Tensor) -> Tensor:
        """Any mixture of slots will do: heads that sum what came so far."""
        return states_ASH.cumsum(1).unflatten(-1, (4, 8))

    found = layer.run(hidden_ASH, attended)
    for block in range(2):
        x = hidden_ASH[block]
        normed = F.rms_norm(x, (32,), layer.input_layernorm.weight, 1e-6)
        mixed = attended(convolved(layer.attention_conv, normed, normed, 0)[None])[0].flatten(1)
        x = x + convolved(layer.attention_conv, normed, mixed @ layer.self_attn.o_proj.weight.T, 1)
        normed = F.rms_norm(x, (32,), layer.post_attention_layernorm.weight, 1e-6)
        inner = convolved(layer.mlp_conv, normed, normed, 0)
        gated = F.silu(inner @ layer.mlp.gate_proj.weight.T) * (inner @ layer.mlp.up_proj.weight.T)
        x = x + convolved(layer.mlp_conv, normed, gated @ layer.mlp.down_proj.weight.T, 1)
        torch.testing.assert_close(found[block], x, atol=1e-4, rtol=1e-4)


class Recorder:
    """A sampler that draws the second likeliest token, and keeps what it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        self.logits.append(logits_BD)
        return logits_BD.topk(2).indices[:, 1], logits_BD.softmax(-1)


@torch.no_grad()
def test_the_walk_scores_candidates_after_the_token_chosen_before() -> None:
    """Scores are those of the formula, everything else is -inf, and probabilities are theirs."""
    draft = speculator_of().draft
    assert isinstance(draft, DFlash2Model)
    selector, head = draft.candidate_selector, draft.lm_head.weight
    states_BSH, anchors, sampler = torch.randn(3, 4, 32), [4, 11, 39], Recorder()
    drafts = Drafts(draft, sampler, 3)
    draft.choose(states_BSH, torch.tensor(anchors), drafts)
    assert len(drafts.token_ids) == 3
    for row, anchor in enumerate(anchors):
        previous = anchor
        for step in range(3):
            hidden = states_BSH[row, 1 + step]
            unary = head @ hidden
            candidates = unary.argsort(descending=True)[:5].tolist()
            query = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden)
            expected = torch.full((40,), -torch.inf)
            for token in candidates:
                expected[token] = unary[token] + query @ selector.successor_codebook[token]
            torch.testing.assert_close(sampler.logits[step][row], expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(drafts.probs[step][row], expected.softmax(-1), atol=1e-4, rtol=1e-4)
            previous = int(expected.argsort(descending=True)[1])
            assert drafts.token_ids[step][row] == previous


@torch.no_grad()
def test_probabilities_are_those_of_the_candidates_alone() -> None:
    speculator = speculator_of()
    batch = pack([[1] * 8], row=8, num_aux=len(speculator.draft.aux_layer_ids))
    cache, rows = speculator.draft.make_cache(1), slice(0, 1)
    context = DraftContext(batch.input_ids[:, 1:6], batch.aux_hidden_states[:, :5], [0], [5], cache, rows)
    probs_KD = speculator.draft.propose(context, 3, Recorder()).probs_BKD[0]
    assert (probs_KD > 0).sum(-1).tolist() == [5, 5, 5]
    torch.testing.assert_close(probs_KD.sum(-1), torch.ones(3))


def test_codebooks_are_no_matrices_to_orthogonalise() -> None:
    draft = speculator_of().draft
    codebooks = {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"}
    assert codebooks < draft.vocabulary_tables()
    optimizers = build_optimizers(draft.named_parameters(), TrainConfig(optimizer="muon"), draft.vocabulary_tables())
    muon = {id(parameter) for group in optimizers["muon"].param_groups for parameter in group["params"]}
    parameters = dict(draft.named_parameters())
    assert not any(id(parameters[name]) in muon for name in codebooks)
    assert id(parameters["candidate_selector.hidden_projection.weight"]) in muon


def test_a_fresh_draft_starts_with_identical_convolutions_and_random_codebooks() -> None:
    speculator = speculator_of()
    speculator.draft.reset_parameters(torch.Generator().manual_seed(5))
    found = dict(speculator.draft.named_parameters())
    for name in ("layers.0.attention_conv", "layers.1.mlp_conv"):
        assert torch.equal(found[f"{name}.base_kernel"], torch.tensor([1.0, 0.0])[:, None].expand(2, 2, 32))
        assert not found[f"{name}.kernel_projection.weight"].any()
    assert found["candidate_selector.successor_codebook"].std().item() == pytest.approx(0.02, rel=0.15)
