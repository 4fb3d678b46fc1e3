"""Faults 14 to 23 and 28 of `tests.models.pitfalls`, on every family: what a prediction is about, sees and counts."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.errors import TrainingError
from speculators.models import FAMILIES
from speculators.models.draft_model import DraftContext, PackedBatch, Sample
from speculators.models.speculator import Speculator
from tests.models.contract import contract_of
from tests.models.drafts import HIDDEN, document_of, gradients, pack, verifier_head
from tests.models.pitfalls import (
    Watched,
    block_families,
    draft_of,
    every_family,
    objective_of,
    whole_vocabulary,
)


def packed(speculator: Speculator, masks: list[list[int]], row: int) -> PackedBatch:
    return pack(masks, row=row, num_aux=len(speculator.draft.aux_layer_ids))


def states_of(family: str, batch: PackedBatch) -> Tensor:
    """The states that a draft of the family reads."""
    return batch.aux_hidden_states if contract_of(family).reads == "aux" else batch.last_hidden_states


@block_families
def test_row_14_a_hole_in_the_mask_takes_out_the_one_slot_of_each_block_that_stands_on_it(family: str) -> None:
    """A slot's mask is that of the token it stands on (pitfall 14)."""
    speculator, mask = draft_of(family), [1] * 12
    mask[6] = 0
    metrics = objective_of(family).step(speculator.draft, packed(speculator, [mask], 12), verifier_head()).metrics
    # Anchors 0..7 but for 6, which is not supervised; of slot k, the block with anchor 6 - k does not count.
    expected = {k: 7 if k == 0 else 6 for k in range(speculator.config.first_slot, 4)}
    assert {k: metrics[f"position_{k}_acc"].count for k in expected} == expected
    assert metrics["loss"].count == sum(expected.values())


@block_families
@pytest.mark.parametrize("from_anchor", [False, True])
def test_row_15_each_slot_is_compared_with_the_verifier_at_the_token_before_the_one_it_predicts(
    family: str, from_anchor: bool
) -> None:
    """Slot j of a block with anchor a has label a + j, or a + j + 1 from the anchor on; no shift is added (pitfall 15).

    Of 16 tokens, those from 11 on are supervised, so that one block stands, at 11. A change of the verifier's state at
    one token changes what a slot learns exactly where the slot's label is the token after that.
    """
    speculator = draft_of(family, sample_from_anchor=from_anchor)
    batch, head = packed(speculator, [[0] * 11 + [1] * 5], 16), verifier_head()

    def slot_gradients() -> Tensor:
        watched = Watched(speculator)
        objective_of(family).step(watched, batch, head).loss.backward()
        (states_ASH,) = watched.outputs
        assert states_ASH.shape[:2] == (1, 4)
        return states_ASH.grad[0]

    before_SH, labels = slot_gradients(), {}
    for place in range(16):
        kept = batch.last_hidden_states.clone()
        batch.last_hidden_states[0, place] = -kept[0, place]
        changed = torch.nonzero((slot_gradients() - before_SH).abs().sum(-1) > 1e-6).flatten().tolist()
        batch.last_hidden_states = kept
        labels |= dict.fromkeys(changed, place + 1)
        assert len(changed) <= 1, place
    assert labels == {slot: 11 + slot + from_anchor for slot in range(0 if from_anchor else 1, 4)}


@block_families
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"sample_from_anchor": True}], ids=str)
def test_row_16_no_block_learns_from_the_states_at_or_after_its_anchor(family: str, options: dict[str, Any]) -> None:
    """Anchors stand one apart, from 0 to 8 of 13 tokens; a block's loss depends on states before it (pitfall 16)."""
    speculator = draft_of(family, **options)
    batch, watched = packed(speculator, [[1] * 13], 13), Watched(speculator)
    states = batch.aux_hidden_states.requires_grad_()
    loss = objective_of(family).step(watched, batch, verifier_head()).loss
    (slots_ASH,) = watched.outputs
    (of_slots_ASH,) = torch.autograd.grad(loss, slots_ASH, retain_graph=True)
    assert len(slots_ASH) == 9
    for anchor, of_slots_SH in enumerate(of_slots_ASH):
        (of_states,) = torch.autograd.grad(slots_ASH[anchor], states, of_slots_SH, retain_graph=True)
        touched = torch.nonzero(of_states[0].abs().sum(-1)).flatten().tolist()
        assert touched == list(range(max(anchor - 2, 0) if "sliding_window" in options else 0, anchor)), anchor


def unrolled(family: str, steps: int) -> tuple[Speculator, Any]:
    """A draft and an objective that train this many draft steps."""
    knobs = {"eagle3": "ttt_steps", "peagle": "num_depths", "eagle": "num_passes", "mtp": "num_steps"}
    if family in knobs:
        kept = {key: value for key, value in contract_of(family).objective.items() if key != knobs[family]}
        return draft_of(family), FAMILIES[family].objective(**{**kept, knobs[family]: steps})
    options: dict[str, Any] = {
        "medusa": {"num_heads": steps},
        "mlp_speculator": {"n_predict": steps, "tie_weights": False},
    }.get(family, {"block_size": steps + 1})
    return draft_of(family, **options), objective_of(family)


# Which family is compared with the verifier's state before a token, and which with the token itself.
LABELS = {"eagle3": "state", "peagle": "state", "eagle": "state", "medusa": "token", "mlp_speculator": "token"}
LABELS["mtp"] = "token"


@pytest.mark.parametrize("place", [2, 7, 15])
@pytest.mark.parametrize("family", LABELS)
def test_row_14_one_supervised_token_is_one_label(family: str, place: int) -> None:
    """Of 16 tokens one is supervised, the last included: one row of logits learns, from that token (pitfall 14)."""
    speculator, objective = unrolled(family, 1)
    batch, head = packed(speculator, [[int(index == place) for index in range(16)]], 16), verifier_head()
    watched = Watched(speculator)
    output = objective.step(watched, batch, head)
    output.loss.backward()
    (states_RH,) = watched.outputs
    assert states_RH.grad.abs().sum(-1).count_nonzero() == 1
    assert output.metrics["loss_0"].count == output.metrics["full_acc_0"].count == 1

    def changed(label: int) -> float:
        """The loss after a change of what stands for the label of this number."""
        kept = batch.last_hidden_states.clone(), batch.input_ids.clone()
        if LABELS[family] == "state":
            batch.last_hidden_states[0, label - 1] = -kept[0][0, label - 1]
        elif label < 16:
            batch.input_ids[0, label] = 3 if kept[1][0, label] != 3 else 5
        loss = objective.step(speculator.draft, batch, head).loss.item()
        batch.last_hidden_states, batch.input_ids = kept
        return loss

    assert abs(changed(place) - output.loss.item()) > 1e-4
    assert changed(place + 1) == output.loss.item()


@every_family
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_row_17_a_document_learns_nothing_of_its_neighbours(family: str, steps: int) -> None:
    """The middle one of three in a row starts supervised; the others' states, tokens and masks do nothing (pitfall 17).

    That packed documents have together what each has alone, positions included, is in the family contract.
    """
    speculator, objective = unrolled(family, steps)
    batch = packed(speculator, [[0] * 7, [1] * 9, [0] * 8], 24)
    states = states_of(family, batch).requires_grad_()
    loss = objective.step(speculator.draft, batch, verifier_head()).loss
    loss.backward()
    inside = torch.zeros(24, dtype=torch.bool)
    inside[7:16] = True
    touched = states.grad[0].abs().sum(-1) > 0
    assert touched[inside].any()
    assert not touched[~inside].any()
    found = gradients(speculator.draft)
    other = packed(speculator, [[0] * 7, [0] * 9, [0] * 8], 24)
    generator = torch.Generator().manual_seed(9)
    for name in ("aux_hidden_states", "last_hidden_states"):
        noise = torch.randn(getattr(batch, name).shape, generator=generator)
        noise[0, inside] = getattr(batch, name).detach()[0, inside]
        setattr(other, name, noise)
    other.input_ids = torch.where(inside, batch.input_ids, batch.input_ids.roll(3, 1))
    other.loss_mask = batch.loss_mask
    again = objective.step(speculator.draft, other, verifier_head()).loss
    again.backward()
    assert loss.item() > 0
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in gradients(speculator.draft).items():
        torch.testing.assert_close(gradient, found[name], rtol=1e-4, atol=1e-5, msg=name)


@block_families
def test_row_18_anchors_are_counted_a_document(family: str) -> None:
    """Packed beside one of 200 tokens, a document of 20 keeps the blocks that it has alone (pitfall 18)."""
    speculator = draft_of(family)
    batch = packed(speculator, [[1] * 20, [1] * 200, [1] * 9], 229)
    objective = FAMILIES[family].objective(max_anchors=12)
    counts = [
        objective.step(speculator.draft, part, verifier_head()).metrics["eal"].count
        for part in (batch, *(document_of(batch, number) for number in range(3)))
    ]
    assert counts == [12 + 12 + 5, 12, 12, 5]


def likeliest(logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
    return logits_BD.argmax(-1), logits_BD.softmax(-1)


def context_of(speculator: Speculator) -> DraftContext:
    """Three verified positions of one request."""
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(1, 3, len(speculator.draft.aux_layer_ids) * HIDDEN, generator=generator)
    normed = torch.randn(1, 3, HIDDEN, generator=generator)
    cache = speculator.draft.make_cache(1)
    return DraftContext(torch.tensor([[5, 7, 9]]), aux, [0], [3], cache, slice(0, 1), normed)


@every_family
@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("size", [2, 8])
def test_row_20_as_many_tokens_are_drafted_as_the_file_says(family: str, size: int, from_anchor: bool) -> None:
    """A block of B slots predicts B - 1 tokens, or B from the anchor on; other families what they say (pitfall 20)."""
    size_of = {"medusa": "num_heads", "mlp_speculator": "n_predict"}
    if family in ("dflash", "dflash2", "dspark"):
        options: dict[str, Any] = {"block_size": size, "sample_from_anchor": from_anchor}
        promised = size - (not from_anchor)
    else:
        options, promised = {size_of.get(family, "num_speculative_tokens"): size}, size
    speculator = draft_of(family, **options)
    written = speculator.config.to_json()["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert written == speculator.num_speculative_tokens == promised
    proposal = speculator.draft.propose(context_of(speculator), written, likeliest)
    assert proposal.token_ids_BK.shape == (1, promised)
    assert proposal.lengths_B.tolist() == [promised]


class Rows(list[Sample]):
    """Samples in memory."""

    @property
    def lengths(self) -> list[int]:
        return [len(sample.input_ids) for sample in self]


@block_families
def test_row_21_samples_in_which_no_block_can_stand_are_an_error_that_says_where_supervision_lies(family: str) -> None:
    """It starts late, or the samples are short: both lengths and the interval are said (pitfall 21)."""
    speculator, objective = draft_of(family), objective_of(family)

    def sample(mask: list[int]) -> Sample:
        states = torch.zeros(len(mask), len(speculator.draft.aux_layer_ids), HIDDEN)
        return Sample(torch.zeros(len(mask)).long(), torch.tensor(mask).bool(), states, states[:, 0])

    late, short, enough = sample([0] * 20 + [1] * 4), sample([1] * 4), sample([0] * 3 + [1, 0, 0, 0, 0])
    with pytest.raises(TrainingError, match=r"of 4 slots .* of 2 samples.*sample 1 with 24 tokens.*from 20 to 23"):
        objective.begin(speculator.draft, Rows([short, late]), verifier_head())
    objective.begin(speculator.draft, Rows([short, late, enough]), verifier_head())


@pytest.mark.parametrize("family", ["eagle3", "peagle", "dflash", "dspark", "medusa"])
def test_row_22_drafts_over_a_part_of_the_vocabulary_are_the_verifiers_ids(family: str) -> None:
    """8 of 40 tokens with gaps: the chosen draft id is mapped, and its law scattered over 40 tokens (pitfall 22).

    What the Markov head of a DSpark draft is fed in between is tested with that family.
    """
    speculator = draft_of(family, draft_vocab_size=8)
    kept = speculator.vocab.draft_ids
    assert kept.tolist() == list(range(3, 19, 2))
    shown: list[Tensor] = []

    def sampler(logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        shown.append(logits_BD)
        return likeliest(logits_BD, step)

    proposal = speculator.draft.propose(context_of(speculator), 3, sampler)
    assert proposal.token_ids_BK[0].tolist() == [3 + 2 * int(logits.argmax()) for logits in shown]
    law_KV = torch.zeros(3, 40).index_add_(1, kept, proposal.probs_BKD[0])
    torch.testing.assert_close(law_KV.sum(-1), torch.ones(3))
    assert torch.equal(law_KV.argmax(-1), proposal.token_ids_BK[0])


def with_an_empty_row(batch: PackedBatch) -> PackedBatch:
    """The same batch, and a row of padding alone."""
    empty = {"document_ids": -1}
    return PackedBatch(
        **{
            item.name: torch.cat((tensor, torch.full_like(tensor[:1], empty.get(item.name, 0))))
            for item in fields(batch)
            for tensor in [getattr(batch, item.name)]
        }
    )


LAYERS = [
    (family, {} if family == "mtp" else {"n_predict": layers} if family == "mlp_speculator" else {"num_layers": layers})
    for family in FAMILIES
    for layers in ((1,) if family == "mtp" else (2, 5) if family == "mlp_speculator" else (1, 2, 5))
]


@pytest.mark.parametrize(("family", "options"), LAYERS, ids=str)
def test_row_23_mixed_lengths_and_padding_give_finite_numbers(family: str, options: dict[str, Any]) -> None:
    """Documents of 1 to 11 tokens, one without supervision, a row of padding alone; with default knobs (pitfall 23)."""
    if family in ("eagle3", "peagle"):
        options = {**options, "layer_type": "qwen3", "sliding_window": 2}
    speculator = draft_of(family, **options)
    masks = [[1] * 5, [0] * 7, [1] * 11, [0, 1, 0, 0, 0, 0, 0], [1], [0, 0, 1]]
    batch = with_an_empty_row(packed(speculator, masks, 16))
    assert (batch.document_ids == -1).all(-1).tolist() == [False, False, False, True]
    torch.manual_seed(0)
    output = FAMILIES[family].objective().step(speculator.draft.train(), batch, verifier_head())
    output.loss.backward()
    assert output.loss.isfinite()
    assert output.loss.item() > 0
    found = gradients(speculator.draft)
    assert found.keys() == {name for name, p in speculator.draft.named_parameters() if p.requires_grad}
    assert all(gradient.isfinite().all() for gradient in found.values())


@every_family
@pytest.mark.parametrize("masks", [[[0] * 9, [0] * 5], [[1]], []], ids=["unsupervised", "short", "padding"])
def test_row_23_a_batch_that_teaches_nothing_is_a_zero(family: str, masks: list[list[int]]) -> None:
    """Loss and gradients are zeros that can be added to those of other batches, and nothing is counted (pitfall 23)."""
    speculator = draft_of(family)
    objective = FAMILIES[family].objective()
    output = objective.step(speculator.draft.train(), packed(speculator, masks, 12), verifier_head())
    output.loss.backward()
    assert output.loss.item() == 0
    assert not any(gradient.any() for gradient in gradients(speculator.draft).values())
    assert {name: tuple(count) for name, count in output.metrics.items() if tuple(count) != (0, 0)} == {}
    assert objective.acceptance_length(output.metrics) == 1.0


@every_family
def test_row_28_a_token_without_supervision_is_no_mismatch(family: str) -> None:
    """A draft that is right everywhere has an acceptance of 1 at every step, whatever the mask leaves out (pitfall 28).

    Draft, verifier and data all say token 0. What stands on or beyond a hole is not counted, neither as right nor as
    wrong.
    """
    speculator = draft_of(family, **whole_vocabulary(family))
    with torch.no_grad():
        for name, parameter in speculator.draft.named_parameters():
            parameter.fill_(float("norm" in name or "embed" in name))
            if name.endswith("lm_head.weight"):
                parameter[0] = 1.0
    head = verifier_head()
    head = replace(head, head=replace(head.head, weight=torch.zeros_like(head.head.weight)))

    def counts(first: list[int]) -> dict[str, tuple[float, float]]:
        batch = packed(speculator, [first, [0] * 3 + [1] * 9], 24)
        batch.input_ids.zero_()
        metrics = objective_of(family).step(speculator.draft, batch, head).metrics
        return {name: tuple(count) for name, count in metrics.items() if name.startswith(("full_acc_", "cond_acc_"))}

    whole, with_a_hole = counts([1] * 24), counts([1] * 11 + [0] + [1] * 12)
    assert whole.keys() == with_a_hole.keys() != set()
    for name, (right, counted) in with_a_hole.items():
        assert 0 < right == counted < whole[name][1] == whole[name][0], name
