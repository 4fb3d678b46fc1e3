"""What every family must keep; a new family is tested here by being in the table.

What a family adds is in `tests/models/<family>/contract.py`; see `tests/models/contract.py`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from speculators.errors import FormatError
from speculators.formats.vllm import describe_for_vllm
from speculators.models import FAMILIES
from speculators.models.cache import SlotCache
from speculators.models.draft_model import DraftContext, PackedBatch
from speculators.models.speculator import Speculator
from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from tests.models.by_heart import PROMPT, depth_of, learnt_by_heart, recite, tiny_verifier, unlearnt, verifications
from tests.models.contract import FamilyContract, Flag, contract_of
from tests.models.drafts import (
    config_of,
    document_of,
    golden_verifier_shape,
    gradients,
    pack,
    random_speculator,
    verifier_head,
    verifier_weights,
)

GOLDEN_CONFIGS = Path(__file__).parent.parent / "golden" / "configs"
CASES = [(family, variant) for family in FAMILIES for variant in contract_of(family).variants]
every_variant = pytest.mark.parametrize(("family", "variant"), CASES)
every_family = pytest.mark.parametrize("family", FAMILIES)


def speculator_of(family: str, variant: str = "plain") -> Speculator:
    return random_speculator(family, **contract_of(family).variants[variant])


class Forced:
    """A sampler that takes the data's tokens, row by row, and keeps the logits it was shown."""

    def __init__(self, draft_ids_BK: Tensor) -> None:
        self.draft_ids_BK = draft_ids_BK
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        assert step == len(self.logits)
        self.logits.append(logits_BD.clone())
        return self.draft_ids_BK[:, step], None


def whole(length: int, speculator: Speculator, seed: int) -> PackedBatch:
    """One document of this length, all of it supervised."""
    return pack([[1] * length], row=length, num_aux=len(speculator.draft.aux_layer_ids), seed=seed)


def states_of(contract: FamilyContract, document: PackedBatch) -> Tensor:
    """The states that the family reads, as training gets them: [1, T, A*H] or [1, T, H]."""
    return document.aux_hidden_states if contract.reads == "aux" else document.last_hidden_states


def serving_context(
    contract: FamilyContract,
    documents: Sequence[PackedBatch],
    starts: Sequence[int],
    lengths: Sequence[int],
    cache: SlotCache,
) -> DraftContext:
    """What serving shows of each document's positions starts .. starts + lengths - 1, padded with nonsense."""
    width, count = max(lengths), len(documents)
    served = [states_of(contract, document)[0] for document in documents]
    if contract.reads == "normed":
        served = [verifier_head().norm(states) for states in served]
    states = torch.full((count, width, served[0].shape[-1]), 7.0)
    ids = torch.zeros(count, width, dtype=torch.int64)
    for row, (document, start, length) in enumerate(zip(documents, starts, lengths, strict=True)):
        ids[row, :length] = document.input_ids[0, start + 1 : start + length + 1]
        states[row, :length] = served[row][start : start + length]
    aux, normed = (states, None) if contract.reads == "aux" else (None, states)
    return DraftContext(ids, aux, list(starts), list(lengths), cache, slice(1, 1 + count), normed)


@every_family
def test_the_config_is_that_of_the_golden_file(family: str) -> None:
    contract = contract_of(family)
    golden = json.loads((GOLDEN_CONFIGS / f"{family}.json").read_text(encoding="utf-8"))
    config = config_of(family, golden_verifier_shape(), contract.golden)
    written = config.to_json()
    assert {key: value for key, value in written.items() if key != "speculators_version"} == golden
    described = describe_for_vllm(config)
    assert contract.vllm
    assert {key: described[key] for key in contract.vllm} == dict(contract.vllm)


@every_variant
def test_config_round_trips_and_refuses_unknown_keys(family: str, variant: str) -> None:
    """Every flag does something, and no key is ignored (pitfall 10)."""
    config = speculator_of(family, variant).config
    written = json.loads(json.dumps(config.to_json()))
    assert type(config).from_json(written).to_json() == written
    assert "model_type" not in written
    assert written["speculators_model_type"] == written["speculators_config"]["algorithm"] == family
    with pytest.raises(FormatError, match="surprise"):
        type(config).from_json({**written, "surprise": 1})


@every_variant
def test_every_tensor_is_accounted_for_and_survives_saving_bit_by_bit(
    family: str, variant: str, tmp_path: Path
) -> None:
    """What is written is loaded, whole and by its name (pitfall 9)."""
    speculator = speculator_of(family, variant)
    expected = speculator.config.expected_tensors()
    tensors = speculator.draft.state_dict()
    required = {name for name, spec in expected.items() if spec.required}
    assert required <= tensors.keys()
    assert tensors.keys() - expected.keys() <= speculator.draft.borrows.keys()
    assert {name: tuple(tensors[name].shape) for name in tensors.keys() & expected.keys()} == {
        name: expected[name].shape for name in tensors.keys() & expected.keys()
    }
    trained = {name for name, parameter in speculator.draft.named_parameters() if parameter.requires_grad}
    assert trained <= expected.keys()
    speculator.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    loaded = Speculator.from_pretrained(tmp_path / "saved")
    assert not trained & set(loaded.draft.missing_tensors())
    loaded.attach_verifier(verifier_weights())
    assert loaded.config.to_json() == {**speculator.config.to_json(), "dtype": "float32"}
    assert loaded.draft.state_dict().keys() == tensors.keys()
    for name, tensor in loaded.draft.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


@every_variant
def test_row_19_training_logits_are_those_of_serving(family: str, variant: str) -> None:
    """Two requests of different lengths, prefilled in chunks, drafting, then going on over their stale drafts.

    Pitfall 12 and pitfall 19.
    """
    contract, speculator = contract_of(family), speculator_of(family, variant)
    depth = contract.depth
    exact = min(depth, FAMILIES[family].parity_depth or depth)
    documents = [whole(length, speculator, seed) for length, seed in ((17, 5), (13, 6))]
    expected = [contract.training_logits(speculator, document) for document in documents]
    vocab, cache = speculator.vocab, speculator.draft.make_cache(4)
    starts, compared = [0, 0], 0
    # Lengths of what each request has verified, per call: chunked prefill, one request resting, several at once.
    for lengths, num_tokens in (((3, 1), 0), ((2, 2), depth), ((0, 1), depth), ((2, 1), 1), ((4, 3), depth)):
        forced = torch.zeros(2, depth, dtype=torch.int64)
        for row, (document, start, length) in enumerate(zip(documents, starts, lengths, strict=True)):
            following = document.input_ids[0, start + length + 1 :][:depth]
            forced[row, : len(following)] = vocab.to_draft(following)
        sampler = Forced(forced)
        context = serving_context(contract, documents, starts, lengths, cache)
        proposal = speculator.draft.propose(context, num_tokens, sampler)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        assert torch.equal(proposal.token_ids_BK, vocab.to_verifier(forced[:, :num_tokens]))
        assert proposal.lengths_B.tolist() == [num_tokens if length else 0 for length in lengths]
        for row in range(2):
            for step in range(min(num_tokens, exact) if lengths[row] else 0):
                wanted = expected[row][step][starts[row] - 1]
                if not wanted.isnan().any():
                    compared += 1
                    shown = sampler.logits[step][row]
                    torch.testing.assert_close(shown, wanted, atol=1e-4, rtol=1e-4, msg=f"row {row}, step {step}")
    assert compared >= 2 * exact


@every_family
def test_probabilities_of_a_sampled_proposal_stay_with_their_rows(family: str) -> None:
    """Drafted ids are the verifier's, probabilities those of the draft's ids (pitfall 22)."""
    contract, speculator = contract_of(family), speculator_of(family)
    documents = [whole(6, speculator, seed) for seed in (3, 4)]

    def sampler(logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return logits_BD.argmax(-1), logits_BD.softmax(-1)

    context = serving_context(contract, documents, [0, 0], [5, 3], speculator.draft.make_cache(3))
    proposal = speculator.draft.propose(context, contract.depth, sampler)
    assert proposal.probs_BKD.shape == (2, contract.depth, speculator.vocab.draft_size)
    assert torch.equal(speculator.vocab.to_verifier(proposal.probs_BKD.argmax(-1)), proposal.token_ids_BK)
    assert speculator.vocab.t2d[proposal.token_ids_BK].all()


@every_variant
def test_row_17_two_packed_documents_are_each_alone(family: str, variant: str) -> None:
    """Documents in one row do not know of each other (pitfall 17)."""
    contract, speculator = contract_of(family), speculator_of(family, variant)
    masks = [[1] * 13, [0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1]]
    batch = pack(masks, row=28, num_aux=len(speculator.draft.aux_layer_ids))
    objective, head = FAMILIES[family].objective(**contract.objective), verifier_head()
    together = objective.step(speculator.draft, batch, head)
    alone = [objective.step(speculator.draft, document_of(batch, number), head) for number in (0, 1)]
    assert all(output.metrics["loss"].count for output in alone)
    for name, count in together.metrics.items():
        assert count.count == pytest.approx(sum(output.metrics[name].count for output in alone), rel=1e-5), name
        assert count.sum == pytest.approx(sum(output.metrics[name].sum for output in alone), rel=1e-5), name


@every_variant
def test_row_16_no_position_sees_its_future(family: str, variant: str) -> None:
    """Nothing sees a state at or after its own place (pitfall 16)."""
    contract, speculator = contract_of(family), speculator_of(family, variant)
    document = whole(11, speculator, 4)
    states, seen = states_of(contract, document).requires_grad_(), 0
    for step, logits in enumerate(contract.training_logits(speculator, document)):
        for slot in range(len(logits)):
            if logits[slot].isnan().any():
                continue
            summed = logits[slot].masked_fill(logits[slot].isinf(), 0.0).sum()
            (gradient,) = torch.autograd.grad(summed, states, retain_graph=True)
            touched = gradient[0].abs().sum(-1) > 0
            assert not touched[slot + 1 :].any(), (step, slot)
            # A window may end before the later drafts of a block; the first always sees the last verified position.
            assert touched[slot] or step, (step, slot)
            seen += 1
    assert seen >= 3 * contract.depth


@every_family
def test_a_later_token_changes_no_earlier_logits(family: str) -> None:
    contract, speculator = contract_of(family), speculator_of(family)
    document, place = whole(13, speculator, 4), 6
    before = contract.training_logits(speculator, document)
    changed = document.input_ids.clone()
    changed[0, place] = speculator.vocab.to_verifier((speculator.vocab.to_draft(changed[0, place]) + 1) % 8)
    document.input_ids = changed
    for step, (one, other) in enumerate(zip(before, contract.training_logits(speculator, document), strict=True)):
        reach = contract.token_reach(step)
        same = (torch.isclose(one, other, atol=1e-6, rtol=0.0) | one.isnan()).all(-1).tolist()
        untouched = len(one) if reach is None else place - reach
        assert all(same[:untouched]), step
        if reach is not None and not one[untouched].isnan().any():
            assert not same[untouched], step


@every_variant
def test_every_trained_parameter_gets_a_gradient_and_no_frozen_one(family: str, variant: str) -> None:
    contract, speculator = contract_of(family), speculator_of(family, variant)
    batch = pack([[0, 0, *[1] * 11]], row=15, num_aux=len(speculator.draft.aux_layer_ids))
    objective = FAMILIES[family].objective(**contract.objective)
    objective.step(speculator.draft, batch, verifier_head()).loss.backward()
    parameters = dict(speculator.draft.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    found = gradients(speculator.draft)
    assert found.keys() == trained
    # A bias of the keys moves all scores of a query alike only as far as positions agree, so it has a gradient too.
    assert {name for name, gradient in found.items() if not gradient.abs().max() > 0} == set()
    assert parameters.keys() - trained <= contract.frozen


def result_of(speculator: Speculator, flag: Flag, contract: FamilyContract, document: PackedBatch) -> list[Tensor]:
    produce = contract.training_logits if flag.output == "logits" else contract.outputs[flag.output]
    with torch.no_grad():
        return produce(speculator, document)


@every_family
def test_every_flag_changes_what_it_says(family: str) -> None:
    """Every flag does something, and no key is ignored (pitfall 10)."""
    contract = contract_of(family)
    for flag in contract.flags:
        plain = random_speculator(family, **flag.base)
        changed = random_speculator(family, **{**flag.base, **flag.change})
        assert plain.config != changed.config, flag
        if flag.output == "trained":
            names = [
                {name for name, parameter in one.draft.named_parameters() if parameter.requires_grad}
                for one in (plain, changed)
            ]
            assert names[0] != names[1], flag
            continue
        target = changed.draft.state_dict()
        shared = {
            name: tensor
            for name, tensor in plain.draft.state_dict().items()
            if name in target and target[name].shape == tensor.shape
        }
        changed.draft.load_state_dict(shared, strict=False)
        document = whole(13, plain, 4)
        pairs = zip(
            result_of(plain, flag, contract, document), result_of(changed, flag, contract, document), strict=False
        )
        compared = [(one[: len(other)].nan_to_num(), other[: len(one)].nan_to_num()) for one, other in pairs]
        differ = [one.shape != other.shape or (one - other).abs().max().item() > 1e-3 for one, other in compared]
        assert any(differ), flag


@every_family
def test_every_boolean_of_the_config_is_flipped_by_a_flag(family: str) -> None:
    """Every flag does something, and no key is ignored (pitfall 10)."""
    contract, kind = contract_of(family), FAMILIES[family].config
    booleans = {name for name, hint in get_type_hints(kind).items() if hint is bool and name in kind.model_fields}
    flipped = set()
    for flag in contract.flags:
        base = random_speculator(family, **flag.base).config
        changed = random_speculator(family, **{**flag.base, **flag.change}).config
        flipped |= {name for name in booleans if getattr(base, name) != getattr(changed, name)}
    assert booleans - flipped == set()


def generate(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


@every_family
def test_row_19_a_draft_that_knows_a_sample_by_heart_is_accepted_throughout(family: str) -> None:
    """What is learnt in training is what is drafted in serving (pitfall 19)."""
    depth = depth_of(family)
    stats = recite(learnt_by_heart(family), depth).stats
    assert stats.num_drafts == verifications(depth)
    assert stats.accepted_per_position == [stats.num_drafts] * depth


@every_family
def test_greedy_output_is_the_verifiers_token_for_token(family: str) -> None:
    """Prompts of different lengths, more than run at once, some of whose drafts are rejected."""
    learnt = learnt_by_heart(family)
    prompts = [PROMPT, [1, 2, 3], [38], learnt.token_ids[:20], [4] * 11, [30, 20, 10, 0], learnt.token_ids[7:12]]
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    limits = EngineLimits(max_num_seqs=3, max_model_len=128, max_num_batched_tokens=16)
    plain = generate(LLM.from_parts(learnt.verifier, limits=limits), prompts, params)
    depth = contract_of(family).depth
    llm = LLM.from_parts(learnt.verifier, learnt.speculator, num_speculative_tokens=depth, limits=limits)
    assert generate(llm, prompts, params) == plain
    assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens


@every_family
def test_sampled_output_follows_the_verifiers_law(family: str) -> None:
    """Tokens two and three of many draws, drafted by probability, against their exact marginal laws."""
    draws, prompt, verifier = 1500, [1, 4, 2], tiny_verifier()
    speculator = unlearnt(family, verifier)
    limits = EngineLimits(max_num_seqs=500, max_model_len=32)
    llm = LLM.from_parts(
        verifier, speculator, num_speculative_tokens=2, draft_sample_method="probabilistic", limits=limits, seed=9
    )
    drawn = np.array(generate(llm, [prompt] * draws, SamplingParams(temperature=1.2, max_tokens=3, ignore_eos=True)))
    assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens
    vocab = verifier.vocab_size
    law_V, prefixes = np.ones(1), [[]]
    for place in range(3):
        with torch.no_grad():
            logits = verifier.model(torch.tensor([prompt + prefix for prefix in prefixes])).logits[:, -1]
        law_PV = law_V[:, None] * (logits.double() / 1.2).softmax(-1).numpy()
        expected = law_PV.sum(0) * draws
        counts = np.bincount(drawn[:, place], minlength=vocab)
        common = expected >= 5
        cells = [(counts[common], expected[common]), (counts[~common].sum(), expected[~common].sum())]
        statistic = sum(((found - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum() for found, wanted in cells)
        assert statistic < chi2.ppf(1 - 1e-6, common.sum()), place
        law_V, prefixes = law_PV.ravel(), [[*prefix, token] for prefix in prefixes for token in range(vocab)]
