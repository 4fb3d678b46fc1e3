"""A window on what a served draft sees: against dense attention, and that training and answers do not feel it."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.errors import SpeculatorsError
from speculators.models.draft_model import DraftContext, PackedBatch
from speculators.models.serving_window import limit_draft_window
from speculators.models.speculator import Speculator
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.proposers.draft_head import DraftHeadProposer
from speculators.runtime.sampling import SamplingParams
from tests.models.by_heart import fresh_speculator, tiny_verifier
from tests.models.contract import contract_of
from tests.models.dflash.dense import DenseDraft as DenseBlocks
from tests.models.drafts import HIDDEN, pack, random_speculator, randomize
from tests.models.eagle3.dense import DenseDraft as DenseChain
from tests.models.serving import Argmax

LENGTH, DEPTH, WINDOW = 14, 3, 5
QWEN3 = {"layer_type": "qwen3"}
BLOCK = {"block_size": 4, "num_layers": 2}
# Tokens 0..LENGTH of a request, and the verifier's states at all but the last of them.
GENERATOR = torch.Generator().manual_seed(4)
TOKENS = torch.randint(40, (LENGTH + 1,), generator=GENERATOR)
STATES = torch.randn(LENGTH, 3 * HIDDEN, generator=GENERATOR)


def propose(speculator: Speculator) -> tuple[list[Tensor], list[int]]:
    """Logits [D] of each step after LENGTH positions, which come in two chunks, and the drafts."""
    cache, sampler, drafts = speculator.draft.make_cache(1), Argmax(), []
    for start, end, num_tokens in ((0, 9, 0), (9, LENGTH, DEPTH)):
        tokens = TOKENS[None, start + 1 : end + 1]
        context = DraftContext(tokens, STATES[None, start:end], [start], [end - start], cache, slice(0, 1))
        drafts = speculator.draft.propose(context, num_tokens, sampler).token_ids_BK[0].tolist() if num_tokens else []
        if not num_tokens:
            speculator.draft.propose(context, 0, sampler)
    return [logits[0] for logits in sampler.logits], drafts


def windowed(layer: Any, num_layers: int) -> Any:
    """The decoder's settings as if it had been trained with the window."""
    return layer.model_copy(update={"layer_types": ["sliding_attention"] * num_layers, "sliding_window": WINDOW})


@pytest.mark.parametrize("options", [{}, {**QWEN3, "num_layers": 2, "sliding_window": 9}])
def test_a_chain_of_drafts_sees_the_window_alone(options: dict[str, Any]) -> None:
    """Each draft sees the last WINDOW positions up to its own, at the positions they have without a window."""
    speculator = random_speculator("eagle3", aux_layer_ids=[1, 4, 6], **options)
    unlimited, _ = propose(speculator)
    limit_draft_window(speculator.draft, WINDOW)
    logits, drafts = propose(speculator)
    dense = DenseChain(speculator)
    dense.layer = windowed(dense.layer, dense.layer.num_hidden_layers)
    tokens = torch.cat((TOKENS, torch.tensor(drafts)))
    # Rows after the last position are of no account.
    states = torch.cat((STATES, torch.zeros(DEPTH, STATES.shape[1])))
    for mine, other, without in zip(logits, dense.unroll(states, tokens, DEPTH), unlimited, strict=True):
        torch.testing.assert_close(mine, other[LENGTH - 1], atol=1e-4, rtol=1e-4)
        assert (mine - without).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "options", "causal"),
    [
        ("dflash", BLOCK, False),
        ("dflash", {**BLOCK, "sliding_window_non_causal": False}, True),
        ("dspark", {**BLOCK, "markov_rank": 6, "sample_from_anchor": False}, False),
    ],
)
def test_a_block_sees_the_window_and_itself_as_before(family: str, options: dict[str, Any], causal: bool) -> None:
    """A DSpark block trained without a window is not made causal by one."""
    speculator = random_speculator(family, aux_layer_ids=[1, 4, 6], **options)
    kept: list[Tensor] = []
    speculator.draft.norm.register_forward_hook(lambda module, inputs, output: kept.append(output[0]))
    propose(speculator)
    limit_draft_window(speculator.draft, WINDOW)
    propose(speculator)
    without, mine = kept
    dense = DenseBlocks(speculator)
    dense.config = dense.config.model_copy(update={"sliding_window_non_causal": not causal})
    dense.layer = windowed(dense.layer, 2)
    document = PackedBatch(
        input_ids=TOKENS[None],
        loss_mask=torch.ones(1, LENGTH + 1, dtype=torch.bool),
        aux_hidden_states=STATES[None],
        last_hidden_states=torch.zeros(1, LENGTH, HIDDEN),
        document_ids=torch.zeros(1, LENGTH + 1, dtype=torch.int64),
        position_ids=torch.arange(LENGTH + 1)[None],
    )
    torch.testing.assert_close(mine, dense.states(document, LENGTH)[: len(mine)], atol=1e-4, rtol=1e-4)
    assert (mine - without).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "options"), [("peagle", {**QWEN3, "num_layers": 2}), ("dflash2", {**BLOCK, "draft_vocab_size": None})]
)
def test_a_served_window_computes_what_a_trained_one_does(family: str, options: dict[str, Any]) -> None:
    """Beside a draft of the same weights whose config has the window."""
    options = {**options, "aux_layer_ids": [1, 4, 6]}
    free = random_speculator(family, **options)
    trained = random_speculator(family, **options, sliding_window=WINDOW)
    for mine, other in zip(free.draft.parameters(), trained.draft.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    unlimited, _ = propose(free)
    limit_draft_window(free.draft, WINDOW)
    for mine, other, without in zip(propose(free)[0], propose(trained)[0], unlimited, strict=True):
        torch.testing.assert_close(mine, other)
        assert not torch.allclose(mine, without, atol=1e-3)


def test_a_window_that_holds_all_changes_nothing() -> None:
    speculator = random_speculator("eagle3")
    unlimited, drafts = propose(speculator)
    limit_draft_window(speculator.draft, LENGTH + DEPTH)
    again, same = propose(speculator)
    torch.testing.assert_close(again, unlimited)
    assert same == drafts


@pytest.mark.parametrize("family", ["eagle3", "dflash", "dspark"])
def test_training_does_not_feel_it(family: str) -> None:
    contract = contract_of(family)
    speculator = random_speculator(family, **contract.variants["plain"])
    document = pack([[1] * 12], row=12, num_aux=len(speculator.draft.aux_layer_ids))
    before = contract.training_logits(speculator, document)
    limit_draft_window(speculator.draft, 2)
    for mine, other in zip(contract.training_logits(speculator, document), before, strict=True):
        assert torch.equal(mine, other)


def test_below_the_trained_window_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Each layer has the narrower of both windows; only a loss is worth a warning."""
    mixed = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    speculator = random_speculator("dflash", **BLOCK, **mixed)
    attentions = [layer.self_attn for layer in speculator.draft.blocks()]
    with caplog.at_level(logging.WARNING):
        limit_draft_window(speculator.draft, 8)
        assert [attention.serving_window for attention in attentions] == [8, 6]
        assert caplog.messages == []
        limit_draft_window(speculator.draft, 4)
    assert [attention.serving_window for attention in attentions] == [4, 4]
    assert [attention.window for attention in attentions] == [None, 6]
    (line,) = caplog.messages
    assert line.startswith("draft_window_size=4 is below the window of 6 that the draft was trained with")


@pytest.mark.parametrize("family", ["mtp", "medusa"])
def test_drafts_without_attention_of_their_own_ignore_it(family: str, caplog: pytest.LogCaptureFixture) -> None:
    speculator = random_speculator(family, **contract_of(family).variants["plain"])
    with caplog.at_level(logging.WARNING):
        limit_draft_window(speculator.draft, 64)
    (line,) = caplog.messages
    assert line == f"draft_window_size=64 is ignored: a draft of family {family} has no attention layers of its own"


@pytest.mark.parametrize("window", [0, -3, 2.0, True, "512", None])
def test_a_window_is_a_whole_number(window: object) -> None:
    with pytest.raises(SpeculatorsError, match=r"draft_window_size=.*expected a whole number of tokens, at least 1"):
        limit_draft_window(random_speculator("eagle3").draft, window)


@pytest.mark.parametrize("family", ["eagle3", "dflash", "dspark"])
def test_greedy_answers_stay_the_verifiers(family: str) -> None:
    """With a window of 2, which no draft was trained for, other drafts are made, but the answers are the same."""
    verifier = tiny_verifier()
    answers: list[dict[str, list[int]]] = []
    drafts: list[list[list[int]]] = []
    for window in (None, 2):
        speculator = fresh_speculator(family, verifier)
        randomize(speculator, 1)
        if window is not None:
            limit_draft_window(speculator.draft, window)
        engine = Engine(verifier, DraftHeadProposer(speculator.draft, 3, 4), limits=EngineLimits(4, 128))
        done, seen = serve(engine)
        answers.append(done)
        drafts.append(seen)
    plain, _ = serve(Engine(verifier, limits=EngineLimits(4, 128)))
    assert answers == [plain, plain]
    assert drafts[0] != drafts[1]


def serve(engine: Engine) -> tuple[dict[str, list[int]], list[list[int]]]:
    """Answers to four prompts, and every draft on the way."""
    params = SamplingParams(temperature=0, max_tokens=16)
    for name, length in (("a", 3), ("b", 30), ("c", 9), ("d", 60)):
        engine.add_request(name, [(7 * i + length) % 40 for i in range(length)], params)
    answers: dict[str, list[int]] = {}
    drafts = []
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id] = output.outputs[0].token_ids
        drafts += [list(request.drafts) for request in engine.running]
    return answers, drafts
