"""What the block computes, against the decoder layers of transformers' own models on whole sequences."""

import pytest
import torch
from torch import Tensor

from speculators.models.draft_model import DraftContext
from speculators.models.mtp.model import MtpSteps
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, VOCAB, random_speculator
from tests.models.mtp.contract import of_style
from tests.models.mtp.dense import DenseBlock
from tests.models.mtp.verifiers import RAW


def speculator_of(style: str) -> Speculator:
    """A random draft; the offsets of the experts, which are no parameters, are random too."""
    speculator = random_speculator("mtp", **of_style(style))
    for buffer in speculator.draft.mtp_layers.buffers():
        buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(5)))
    return speculator


def random_document(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator), torch.randn(length, HIDDEN, generator=generator)


@pytest.mark.parametrize("style", RAW)
def test_packed_steps_are_those_of_transformers_layer_on_each_document(style: str) -> None:
    """A gain that is stored less one is read so; what is turned is what the config says (pitfall 2 and pitfall 4)."""
    speculator = speculator_of(style)
    twin = DenseBlock(style, speculator.draft.state_dict())
    documents = [random_document(length, seed) for length, seed in ((12, 1), (7, 2))]
    lengths = [len(ids) - 4 for ids, _ in documents]
    inputs = MtpSteps(
        torch.cat([states[:length] for (_, states), length in zip(documents, lengths, strict=True)]),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.stack(
            [
                torch.cat([ids[k + 1 : k + 1 + length] for (ids, _), length in zip(documents, lengths, strict=True)])
                for k in range(3)
            ]
        ),
        lengths,
    )
    found = speculator.draft(inputs)
    expected = zip(*(twin.steps(ids, states, 3) for ids, states in documents), strict=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs), atol=2e-5, rtol=1e-4)


class Drawn:
    """A sampler that takes given tokens and keeps the logits."""

    def __init__(self, token_ids_BK: Tensor) -> None:
        self.token_ids_BK = token_ids_BK
        self.logits: list[Tensor] = []

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, None]:
        self.logits.append(logits_BD)
        return self.token_ids_BK[:, step], None


@pytest.mark.parametrize("style", ["mimo", "qwen3", "qwen3_next", "deepseek", "glm"])
def test_later_drafts_see_true_states_first_and_their_own_after(style: str) -> None:
    """Two requests, chunked prefill, a round of drafts that is thrown away, and a second one: steps 0, 1 and 2."""
    speculator = speculator_of(style)
    twin = DenseBlock(style, speculator.draft.state_dict())
    documents = [random_document(12, 1), random_document(9, 2)]
    cache, verified = speculator.draft.make_cache(2), [0, 0]
    for lengths in ((4, 1), (3, 4)):
        width = max(lengths)
        ids, states = torch.zeros(2, width, dtype=torch.int64), torch.full((2, width, HIDDEN), 3.0)
        for row, (start, length) in enumerate(zip(verified, lengths, strict=True)):
            ids[row, :length] = documents[row][0][start + 1 : start + 1 + length]
            states[row, :length] = documents[row][1][start : start + length]
        drafts = torch.tensor([[7, 8, 9], [10, 11, 12]])
        sampler = Drawn(drafts)
        context = DraftContext(ids, None, list(verified), list(lengths), cache, slice(0, 2), states)
        proposal = speculator.draft.propose(context, 3, sampler)
        assert torch.equal(proposal.token_ids_BK, drafts)
        verified = [start + length for start, length in zip(verified, lengths, strict=True)]
        for row, length in enumerate(verified):
            tokens, hidden = documents[row][0][1 : length + 1], documents[row][1][:length]
            for step in range(3):
                out = twin(tokens, hidden)[-1]
                torch.testing.assert_close(sampler.logits[step][row], twin.lm_head @ out, atol=1e-4, rtol=1e-4)
                tokens, hidden = torch.cat((tokens, drafts[row, step, None])), torch.cat((hidden, out[None]))


@pytest.mark.parametrize("style", ["llama_bias", "qwen3_next", "qwen3_5"])
def test_a_fresh_block_has_neutral_norms_and_zero_biases(style: str) -> None:
    """A gain that is stored less one is read so (pitfall 2)."""
    draft = random_speculator("mtp", **of_style(style)).draft
    draft.reset_parameters(torch.Generator().manual_seed(1))
    for name, parameter in draft.mtp_layers.named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.3), name
        else:
            neutral = 0.0 if name.endswith("bias") or style.startswith("qwen3_") else 1.0
            assert parameter.eq(neutral).all(), name
