"""Drafts of the EAGLE kin, converted: same logits as a plain reference computed from the foreign tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.draft_model import DraftContext
from speculators.models.speculator import Speculator
from tests.convert import layouts_eagle as layouts
from tests.convert import reference_eagle as reference
from tests.convert.converting import Spoken, converted, spoken_by
from tests.convert.foreign import ForeignCheckpoint
from tests.convert.layouts_eagle import CASES
from tests.convert.reference_eagle import Drafted, Foreign, Meaning

STEPS = 4
# What each producer's own code does. Features index transformers' hidden states: an id of an output is one less.
MEANINGS = {
    "safeailab-eagle3": Meaning((2, 4, 5)),
    "safeailab-eagle3-llama3": Meaning((2, 4, 5)),
    "specforge": Meaning((1, 4, 6)),
    "specforge-eagle3.1": Meaning((2, 4, 5), hands_on_normed=True),
    "specforge-other-width": Meaning((2, 4, 5)),
    "angelslim": Meaning((2, 5, 7)),
    "modelopt-eagle3": Meaning((2, 3, 6)),
    "modelopt-megatron": Meaning((2, 4, 5), adds_normed=True),
    "modelopt-float8": Meaning((2, 4, 5)),
    "deepspec-eagle3": Meaning((0, 2, 4, 5, 7)),
    "nebius": Meaning((2, 4, 5)),
    "absolute-map": Meaning((2, 4, 5)),
    "flags-alone": Meaning((2, 4, 5)),
    "depth-ids": Meaning((1, 3, 7), adds_normed=True),
    "peagle": Meaning((1, 4, 6)),
}


@pytest.fixture(scope="module")
def spoken(tiny_verifier: Path) -> Spoken:
    return spoken_by(tiny_verifier, layouts.VOCAB)


def drafted(directory: Path, verifier: Path, tokens: Tensor, hidden_states: tuple[Tensor, ...], steps: int) -> Drafted:
    """What the converted draft proposes after `tokens`."""
    speculator = Speculator.from_pretrained(directory, dtype=torch.float32)
    speculator.attach_verifier(load_verifier_weights(verifier))
    draft, found = speculator.draft, Drafted([], [])

    def likeliest(logits: Tensor, step: int) -> tuple[Tensor, None]:
        found.logits.append(logits[0])
        return logits.argmax(-1), None

    features = [hidden_states[depth][:-1] for depth in draft.aux_layer_ids]
    context = DraftContext(
        token_ids_BT=tokens[None, 1:],
        aux_hidden_states_BTX=torch.cat(features, -1)[None] if features else None,
        starts=[0],
        lengths=[len(tokens) - 1],
        cache=draft.make_cache(1),
        rows=slice(0, 1),
        normed_hidden_states_BTH=hidden_states[-1][None, :-1],
    )
    found.tokens.extend(draft.propose(context, steps, likeliest).token_ids_BK[0].tolist())
    return found


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_converted_draft_computes_what_its_producer_means(
    make: Callable[[], ForeignCheckpoint],
    tiny_verifier: Path,
    spoken: Spoken,
    tmp_path: Path,
) -> None:
    case = make()
    weights = load_verifier_weights(tiny_verifier)
    foreign = Foreign(case, weights.embed_tokens, weights.lm_head)
    conversion = converted(case, tmp_path, tiny_verifier)
    family = conversion.plan.family
    expected = getattr(reference, family)(foreign, *spoken, MEANINGS.get(case.layout, Meaning()), STEPS)
    got = drafted(conversion.directory, tiny_verifier, *spoken, STEPS)
    assert got.tokens == expected.tokens
    for mine, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_every_tensor_is_accounted_for(
    make: Callable[[], ForeignCheckpoint], tiny_verifier: Path, tmp_path: Path
) -> None:
    case = make()
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert sorted([*plan.used, *plan.dropped]) == sorted(case.tensors)
