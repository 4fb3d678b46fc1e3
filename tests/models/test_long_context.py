"""A draft of short samples past the length it was trained on, with a window on what it sees and without."""

import pytest
import torch

from speculators.formats.verifier_weights import VerifierWeights
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch
from speculators.models.losses import VerifierHead
from speculators.models.serving_window import limit_draft_window
from speculators.models.speculator import Speculator
from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from tests.models.by_heart import fresh_speculator, sample_of, tiny_verifier
from tests.models.contract import contract_of
from tests.models.drafts import VOCAB

TRAINED, STEPS, DOCUMENTS = 24, 200, 96
LIMITS = EngineLimits(16, 256)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(VOCAB, (count, length), generator=generator).tolist()
    return ids


def params(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)


def trained_on_short_samples(family: str) -> Speculator:
    """A draft that has seen the verifier's greedy answers, TRAINED tokens with the prompt, and nothing longer."""
    verifier = tiny_verifier()
    given = prompts(DOCUMENTS, 6, 0)
    outputs = LLM.from_parts(verifier, limits=LIMITS).generate(given, params(TRAINED - 6), use_tqdm=False)
    speculator = fresh_speculator(family, verifier)
    layers = speculator.draft.aux_layer_ids
    samples = [sample_of(verifier, o.prompt_token_ids + o.outputs[0].token_ids, layers) for o in outputs]
    batches = [packed(samples[first : first + 16]) for first in range(0, DOCUMENTS, 16)]
    head = VerifierHead.from_weights(VerifierWeights.from_model(verifier.model))
    objective = FAMILIES[family].objective(**contract_of(family).overfit.objective)
    optimizer = torch.optim.Adam(list(speculator.draft.trained_parameters()), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(0)
    speculator.draft.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        objective.step(speculator.draft, batches[step % len(batches)], head).loss.backward()
        optimizer.step()
        schedule.step()
    return speculator


def packed(samples: list[PackedBatch]) -> PackedBatch:
    """Samples of TRAINED tokens, one after another in one row."""
    return PackedBatch(
        input_ids=torch.cat([one.input_ids for one in samples], 1),
        loss_mask=torch.cat([one.loss_mask for one in samples], 1),
        aux_hidden_states=torch.cat([one.aux_hidden_states for one in samples], 1),
        last_hidden_states=torch.cat([one.last_hidden_states for one in samples], 1),
        document_ids=torch.arange(len(samples)).repeat_interleave(TRAINED)[None],
        position_ids=torch.arange(TRAINED).repeat(len(samples))[None],
    )


def acceptance_length(speculator: Speculator, given: list[list[int]], length: int) -> tuple[float, list[list[int]]]:
    """That of greedy answers to the prompts, and the answers."""
    llm = LLM.from_parts(tiny_verifier(), speculator, num_speculative_tokens=3, limits=LIMITS)
    outputs = llm.generate(given, params(length), use_tqdm=False)
    assert llm.stats is not None
    return llm.stats.acceptance_length, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.full
def test_a_window_brings_back_drafts_past_the_trained_length() -> None:
    """Contexts of 200 tokens and more, for a draft of samples of 24; answers are the same, fewer passes write them."""
    speculator, given = trained_on_short_samples("dflash"), prompts(48, 200, 1)
    without, answers = acceptance_length(speculator, given, 40)
    limit_draft_window(speculator.draft, TRAINED)
    within, same = acceptance_length(speculator, given, 40)
    assert same == answers
    assert within - 1 > 1.1 * (without - 1)
