"""The DFlash network and its attention against their dense twins, and what serving adds to them."""

import math

import pytest
import torch
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.models.dflash.anchors import documents_of
from speculators.models.dflash.blocks import BlockMask, BlockPlan, block_attention
from speculators.models.dflash.model import BlockInputs
from speculators.models.draft_model import DraftContext, PackedBatch
from speculators.models.speculator import Speculator
from tests.models.dflash.dense import DenseDraft, sees
from tests.models.drafts import document_of, pack, random_speculator

OPTIONS = {"block_size": 4, "num_layers": 2}
MIXED = {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}


def inputs_of(batch: PackedBatch, anchors: list[int], lengths: list[int]) -> BlockInputs:
    """A batch of one row without padding."""
    anchors_A = torch.tensor(anchors)
    ids_T, positions_T = batch.input_ids[0], batch.position_ids[0]
    return BlockInputs(batch.aux_hidden_states[0], positions_T, lengths, anchors_A, ids_T[anchors_A])


def row(lengths: list[int], speculator: Speculator) -> PackedBatch:
    num_aux = len(speculator.draft.aux_layer_ids)
    return pack([[1] * length for length in lengths], row=sum(lengths), num_aux=num_aux, seed=5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window_non_causal": False},
        {"sliding_window": 2},
        {"sliding_window": 3, "sliding_window_non_causal": False},
        MIXED,
        {"sample_from_anchor": True, "attention_bias": True, "block_size": 2},
        {"block_size": 7, "sliding_window": 5},
    ],
)
def test_states_of_packed_blocks_are_those_of_the_dense_twin(options: dict) -> None:
    """Blocks of two documents, the first token among the anchors, blocks overlapping and reaching beyond the end."""
    speculator = random_speculator("dflash", **OPTIONS | options)
    batch = row([9, 6], speculator)
    anchors = [0, 1, 2, 5, 8, 9, 10, 14]
    states = speculator.draft(inputs_of(batch, anchors, [9, 6]))
    dense = DenseDraft(speculator)
    for index, anchor in enumerate(anchors):
        document, start = (0, 0) if anchor < 9 else (1, 9)
        expected = dense.states(document_of(batch, document), anchor - start)
        torch.testing.assert_close(states[index], expected, atol=2e-5, rtol=1e-4)


def dense_attention(tensors: list[Tensor], anchors: list[int], lengths: list[int], mask: BlockMask) -> Tensor:
    """All blocks against all keys of all documents in one score matrix."""
    q_ASQD, k_ASND, v_ASND, k_CND, v_CND = tensors
    slots, group = q_ASQD.shape[1], q_ASQD.shape[2] // k_CND.shape[1]
    document = [number for number, length in enumerate(lengths) for _ in range(length)]
    position = [place for length in lengths for place in range(length)]
    rule = {"causal": mask.causal, "window": mask.window}
    keys = torch.cat((k_CND, k_ASND.flatten(0, 1))).repeat_interleave(group, 1)
    values = torch.cat((v_CND, v_ASND.flatten(0, 1))).repeat_interleave(group, 1)
    rows = []
    for block, index in enumerate(anchors):
        anchor = position[index]
        for slot in range(slots):
            query = anchor + slot
            of_context = [
                document[key] == document[index] and sees(query, position[key], anchor=anchor, in_block=False, **rule)
                for key in range(len(document))
            ]
            of_blocks = [
                other == block and sees(query, anchor + key, anchor=anchor, in_block=True, **rule)
                for other in range(len(anchors))
                for key in range(slots)
            ]
            rows.append(of_context + of_blocks)
    visible = torch.tensor(rows)
    scores = torch.einsum("rqd,kqd->qrk", q_ASQD.flatten(0, 1), keys) / math.sqrt(q_ASQD.shape[-1])
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("qrk,kqd->rqd", weights, values).unflatten(0, (len(anchors), slots))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("max_scores", [1, 60, 10_000])
def test_attention_and_its_gradients_are_those_of_one_dense_matrix(
    causal: bool, window: int | None, max_scores: int
) -> None:
    """Pitfall 12 and pitfall 27: causality and windows reach output and gradients, whatever the pieces."""
    lengths, anchors, slots = [7, 1, 5], [0, 1, 2, 6, 7, 9, 12], 3
    torch.manual_seed(0)
    shapes = [(7, slots, 4, 6), (7, slots, 2, 6), (7, slots, 2, 6), (13, 2, 6), (13, 2, 6)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = BlockMask(causal, window)
    plan = BlockPlan.make(torch.tensor(anchors), slots, lengths, mask, max_scores)
    out = block_attention(tensors[0], (tensors[1], tensors[2]), (tensors[3], tensors[4]), plan, 6**-0.5)
    expected = dense_attention(tensors, anchors, lengths, mask)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_pieces_lie_within_a_document_and_within_the_bound() -> None:
    """Three slots: the blocks 0, 1, 2 need 3 * 3 * (2 + 3) = 45 scores, with the fourth 4 * 3 * (6 + 3) = 108."""
    plan = BlockPlan.make(torch.tensor([0, 1, 2, 6, 7, 9, 12]), 3, [7, 1, 5], BlockMask(False), max_scores=60)
    found = [(piece.blocks.start, piece.blocks.stop, piece.keys.start, piece.keys.stop) for piece in plan.pieces]
    assert found == [(0, 3, 0, 2), (3, 4, 0, 6), (4, 5, 7, 7), (5, 7, 8, 12)]


def test_a_windows_pieces_read_no_more_keys_than_they_need() -> None:
    plan = BlockPlan.make(torch.tensor([3, 90, 91]), 2, [100], BlockMask(False, 10), max_scores=30)
    assert [(piece.keys.start, piece.keys.stop) for piece in plan.pieces] == [(0, 3), (81, 90), (82, 91)]


def test_documents_of_ascending_indices() -> None:
    assert documents_of(torch.tensor([0, 3, 4, 4, 9]), [4, 1, 3, 5]) == [2, 2, 0, 1]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"sliding_window_non_causal": False}])
def test_no_block_has_a_gradient_from_its_anchor_on(options: dict) -> None:
    """Pitfall 16: with anchors one apart, no block sees the states at or after its own anchor."""
    speculator = random_speculator("dflash", **OPTIONS | options)
    batch = row([12], speculator)
    batch.aux_hidden_states.requires_grad_()
    anchors = list(range(1, 12))
    states = speculator.draft(inputs_of(batch, anchors, [12]))
    for index, anchor in enumerate(anchors):
        (gradient,) = torch.autograd.grad(states[index].sum(), batch.aux_hidden_states, retain_graph=True)
        touched = gradient[0].abs().sum(-1) > 0
        assert not touched[anchor:].any()
        assert touched[anchor - 1]


def test_a_window_ends_at_the_slot_and_not_at_the_anchor() -> None:
    """With a window of 3, slot k of anchor a sees the context after a + k - 3; one layer passes nothing on."""
    speculator = random_speculator("dflash", block_size=4, num_layers=1, sliding_window=3)
    batch = row([12], speculator)
    batch.aux_hidden_states.requires_grad_()
    states = speculator.draft(inputs_of(batch, [7], [12]))
    for slot, seen in enumerate(([5, 6], [6], [], [])):
        (gradient,) = torch.autograd.grad(states[0, slot].sum(), batch.aux_hidden_states, retain_graph=True)
        assert torch.nonzero(gradient[0].abs().sum(-1)).flatten().tolist() == seen


class Shown:
    """A sampler that takes the likeliest token and keeps what it was shown."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        self.logits.append(logits_BD.clone())
        return logits_BD.argmax(-1), None


def context_of(speculator: Speculator, batch: PackedBatch, length: int) -> DraftContext:
    return DraftContext(
        batch.input_ids[:, 1 : length + 1],
        batch.aux_hidden_states[:, :length],
        [0],
        [length],
        speculator.draft.make_cache(1),
        slice(0, 1),
    )


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("block_size", [2, 8])
def test_a_block_drafts_as_many_tokens_as_the_config_promises(block_size: int, from_anchor: bool) -> None:
    """Pitfall 20: B - 1 tokens where slot 0 repeats the anchor, B where it predicts."""
    speculator = random_speculator("dflash", block_size=block_size, num_layers=1, sample_from_anchor=from_anchor)
    promised = block_size if from_anchor else block_size - 1
    assert speculator.num_speculative_tokens == promised == speculator.config.max_speculative_tokens
    context = context_of(speculator, row([9], speculator), 5)
    proposal = speculator.draft.propose(context, promised, Shown())
    assert proposal.token_ids_BK.shape == (1, promised)
    assert proposal.lengths_B.tolist() == [promised]
    with pytest.raises(
        SpeculatorsError, match=f"{promised + 1} draft tokens asked for; this draft makes at most {promised} at once"
    ):
        speculator.draft.propose(context, promised + 1, Shown())


@pytest.mark.parametrize("non_causal", [False, True])
def test_fewer_tokens_are_the_first_of_a_whole_block(non_causal: bool) -> None:
    """Slots that see each other were trained in whole blocks, and so are served in them."""
    speculator = random_speculator("dflash", **OPTIONS, sliding_window_non_causal=non_causal)
    batch, shown = row([9], speculator), [Shown(), Shown()]
    for sampler, tokens in zip(shown, (3, 1), strict=True):
        speculator.draft.propose(context_of(speculator, batch, 5), tokens, sampler)
    assert len(shown[1].logits) == 1
    torch.testing.assert_close(shown[0].logits[0], shown[1].logits[0])
    expected = DenseDraft(speculator).logits(batch, 5)[1]
    torch.testing.assert_close(shown[1].logits[0][0], expected, atol=2e-5, rtol=1e-4)


def test_drafts_are_the_verifiers_ids() -> None:
    speculator = random_speculator("dflash", **OPTIONS)
    sampler = Shown()
    proposal = speculator.draft.propose(context_of(speculator, row([9], speculator), 4), 3, sampler)
    likeliest = torch.stack([logits[0].argmax() for logits in sampler.logits])
    assert proposal.token_ids_BK[0].tolist() == [3 + 2 * int(draft_id) for draft_id in likeliest]


def test_states_of_the_verifier_are_asked_for() -> None:
    speculator = random_speculator("dflash", **OPTIONS)
    context = context_of(speculator, row([9], speculator), 4)
    context.aux_hidden_states_BTX = None
    with pytest.raises(SpeculatorsError, match=r"reads the verifier's states \(2, 6\); none were given"):
        speculator.draft.propose(context, 3, Shown())
