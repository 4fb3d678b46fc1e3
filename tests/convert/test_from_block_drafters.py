"""Block drafters, converted: same logits as a plain reference computed from the foreign tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import Conversion, convert
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.draft_model import DraftContext
from speculators.models.speculator import Speculator
from tests.convert import layouts_block as layouts
from tests.convert import reference_block as reference
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.layouts_block import CASES
from tests.convert.reference_block import Drafted, Foreign, Meaning
from tests.models.serving import Argmax

Make = Callable[[], ForeignCheckpoint]
Spoken = tuple[Tensor, tuple[Tensor, ...]]
FULL, BOTH_SEE = (None, None), (False, False)
# What each producer's own code does; an id of an output is one less than transformers' index.
PLAIN = Meaning((2, 4, 7), False, BOTH_SEE, FULL)
NEXT = Meaning((2, 4, 7), True, BOTH_SEE, FULL)
MEANINGS: dict[str, Meaning] = {
    "z-lab-dflash-nested": Meaning((2, 4, 7), False, (False, False, False), (None, None, None)),
    "z-lab-dflash-causal": Meaning((2, 4, 7), False, (True, True), FULL),
    "z-lab-dflash-windows": Meaning((2, 4, 7), False, (True, True), (4, 4)),
    "z-lab-dflash-mixed": Meaning((2, 4, 7), False, BOTH_SEE, (4, None)),
    "z-lab-dflash-unordered": Meaning((7, 2, 4), False, BOTH_SEE, FULL),
    # round(1 + i * 4 / 2) = 1, 3, 5 are outputs.
    "z-lab-dflash-no-ids": Meaning((2, 4, 6), False, BOTH_SEE, FULL),
    "modelopt-dflash-windows": Meaning((2, 4, 7), False, BOTH_SEE, (4, 4)),
    "deepspec-dflash": NEXT,
    "deepspec-dspark-embeddings": Meaning((0, 3, 7), True, BOTH_SEE, FULL),
}


def meaning_of(case: ForeignCheckpoint) -> Meaning:
    return MEANINGS.get(case.layout, NEXT if "dspark" in case.layout else PLAIN)


@pytest.fixture(scope="module")
def spoken(tiny_verifier: Path) -> Spoken:
    """Tokens [T] and the verifier's hidden states of them, as transformers counts them, each [T, H]."""
    model = LlamaForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    tokens = torch.randint(2, layouts.VOCAB, (11,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
    return tokens, tuple(state[0] for state in states)


def converted(case: ForeignCheckpoint, tmp_path: Path, verifier: Path) -> Conversion:
    source = case.write(tmp_path / "foreign")
    given = ConversionVerifier(str(verifier))
    return convert(source, tmp_path / "ours", verifier=given, options=ConvertOptions(**case.options))


def drafted(directory: Path, verifier: Path, tokens: Tensor, hidden_states: tuple[Tensor, ...]) -> Drafted:
    """What the converted draft proposes after `tokens`, a whole block."""
    speculator = Speculator.from_pretrained(directory, dtype=torch.float32)
    speculator.attach_verifier(load_verifier_weights(verifier))
    draft, sampler = speculator.draft, Argmax()
    context = DraftContext(
        token_ids_BT=tokens[None, 1:],
        aux_hidden_states_BTX=torch.cat([hidden_states[depth][:-1] for depth in draft.aux_layer_ids], -1)[None],
        starts=[0],
        lengths=[len(tokens) - 1],
        cache=draft.make_cache(1),
        rows=slice(0, 1),
    )
    proposal = draft.propose(context, speculator.num_speculative_tokens, sampler)
    sure = [] if proposal.confidence_BK is None else list(proposal.confidence_BK[0])
    return Drafted([logits[0] for logits in sampler.logits], proposal.token_ids_BK[0].tolist(), sure)


def expected(case: ForeignCheckpoint, verifier: Path, spoken: Spoken) -> Drafted:
    weights = load_verifier_weights(verifier)
    return reference.drafted(Foreign(case, weights.embed_tokens, weights.lm_head), *spoken, meaning_of(case))


def assert_same(got: Drafted, wanted: Drafted) -> None:
    assert got.tokens == wanted.tokens
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-5, atol=1e-5)
    assert len(got.confidence) == len(wanted.confidence)
    for mine, theirs in zip(got.confidence, wanted.confidence, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_converted_draft_computes_what_its_producer_means(
    make: Make, tiny_verifier: Path, spoken: Spoken, tmp_path: Path
) -> None:
    case = make()
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert sorted([*plan.used, *plan.dropped]) == sorted(case.tensors)
    slots = layouts.BLOCK if meaning_of(case).next_token else layouts.BLOCK - 1
    wanted = expected(case, tiny_verifier, spoken)
    assert len(wanted.tokens) == slots
    assert_same(drafted(tmp_path / "ours", tiny_verifier, *spoken), wanted)
