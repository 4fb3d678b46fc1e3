from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from speculators.errors import FormatError, SpeculatorsError
from speculators.models.draft_model import Proposal
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, VOCAB, draft_vocab, random_speculator, verifier_weights
from tests.models.serving import greedy_proposal

LAYOUTS = {
    "heads_of_their_own": {"num_heads": 3, "draft_vocab_size": None},
    "shared_head": {"num_heads": 3, "draft_vocab_size": None, "shared_lm_head": True},
    "two_layers_without_biases": {"num_heads": 2, "draft_vocab_size": None, "num_layers": 2, "bias": False},
}


def propose(
    speculator: Speculator, states_BTH: Tensor, lengths: list[int], num_tokens: int
) -> tuple[Proposal, list[Tensor]]:
    """Tokens do not matter."""
    return greedy_proposal(speculator, torch.zeros(states_BTH.shape[:2]).long(), states_BTH, lengths, num_tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_written_read_and_computed_by_hand(layout: str, tmp_path: Path) -> None:
    """Pitfall 36: output heads of their own and one shared head, which is stored once."""
    options = LAYOUTS[layout]
    random_speculator("medusa", **options).save_pretrained(tmp_path / "saved", dtype=torch.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    heads, shared = options["num_heads"], options.get("shared_lm_head", False)
    assert sorted(name for name in stored if name.startswith("lm_head")) == (
        ["lm_head.weight"] if shared else [f"lm_heads.{head}.weight" for head in range(heads)]
    )
    assert ("blocks.0.layers.0.bias" in stored) is options.get("bias", True)
    if shared:
        assert torch.equal(stored["lm_head.weight"], verifier_weights().lm_head)
    loaded = Speculator.from_pretrained(tmp_path / "saved")
    assert loaded.draft.missing_tensors() == []
    states = torch.randn(2, 4, HIDDEN, generator=torch.Generator().manual_seed(3))
    proposal, logits = propose(loaded, states, [4, 2], heads)
    for row, last in enumerate((3, 1)):
        for head in range(heads):
            x = states[row, last]
            for layer in range(options.get("num_layers", 1)):
                name = f"blocks.{head}.layers.{layer}"
                x = x + F.silu(stored[f"{name}.weight"] @ x + stored.get(f"{name}.bias", torch.zeros(HIDDEN)))
            expected = stored["lm_head.weight" if shared else f"lm_heads.{head}.weight"] @ x
            torch.testing.assert_close(logits[head][row], expected, atol=1e-4, rtol=1e-4)
            assert proposal.token_ids_BK[row, head] == expected.argmax()


@pytest.mark.parametrize("shared", [False, True])
def test_a_fresh_draft_says_what_the_verifiers_head_says(shared: bool) -> None:
    speculator = random_speculator("medusa", draft_vocab_size=None, shared_lm_head=shared)
    speculator.draft.reset_parameters(torch.Generator().manual_seed(1))
    for head in range(5):
        if not shared:
            assert speculator.draft.lm_heads[head].weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert (speculator.draft.blocks[head].layers[0].weight == 0).all()
        assert 0 < speculator.draft.blocks[head].layers[0].bias.abs().max() <= HIDDEN**-0.5
    fresh = Speculator.create(speculator.config, verifier_weights())
    with torch.no_grad():
        for block in fresh.draft.blocks:
            block.layers[0].bias.zero_()
    states = torch.randn(1, 1, HIDDEN)
    _, logits = propose(fresh, states, [1], 5)
    for shown in logits:
        torch.testing.assert_close(shown, states[0] @ verifier_weights().lm_head.T, atol=1e-4, rtol=1e-4)
    assert fresh.draft.output_head(0).weight.requires_grad is not shared
    assert not shared or fresh.draft.output_head(0) is fresh.draft.output_head(4)


@pytest.mark.parametrize("shared", [False, True])
def test_a_truncated_vocabulary_is_stored_as_the_verifiers_ids(shared: bool, tmp_path: Path) -> None:
    """Drafted ids are the verifier's, probabilities those of the draft's ids (pitfall 22)."""
    speculator = random_speculator("medusa", num_heads=2, shared_lm_head=shared)
    speculator.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(stored["token_map"], draft_vocab().draft_ids)
    assert {"d2t", "t2d"}.isdisjoint(stored)
    loaded = Speculator.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.vocab.d2t, draft_vocab().d2t)
    assert torch.equal(loaded.vocab.t2d, draft_vocab().t2d)
    states = torch.randn(1, 1, HIDDEN)
    proposal, logits = propose(loaded, states, [1], 2)
    assert logits[0].shape == (1, 16)
    # vLLM puts the logits at the map's places of a full row of -inf.
    whole = torch.full((2, VOCAB), -torch.inf)
    whole[:, stored["token_map"]] = torch.cat(logits)
    assert proposal.token_ids_BK[0].tolist() == whole.argmax(-1).tolist()
    if shared:
        assert torch.equal(stored["lm_head.weight"], verifier_weights().lm_head[draft_vocab().draft_ids])


@pytest.mark.parametrize("change", ["swapped", "twice", "negative", "outside"])
def test_a_map_that_is_not_ascending_ids_of_the_verifier_is_refused(change: str, tmp_path: Path) -> None:
    """A map in another form is refused (pitfall 32)."""
    random_speculator("medusa").save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    ids = tensors["token_map"]
    place, value = {"swapped": (0, 99), "twice": (1, ids[0]), "negative": (0, -1), "outside": (-1, VOCAB)}[change]
    ids[place] = value
    save_file(tensors, file)
    with pytest.raises(FormatError, match=r"F015 d2t-invalid: token_map starts .* within 0\.\.39, each once"):
        Speculator.from_pretrained(tmp_path / "saved")


def test_fewer_tokens_than_heads_come_from_the_first_and_more_are_refused() -> None:
    speculator = random_speculator("medusa", num_heads=3, draft_vocab_size=None)
    states = torch.randn(3, 2, HIDDEN)
    every, _ = propose(speculator, states, [2, 0, 1], 3)
    one, logits = propose(speculator, states, [2, 0, 1], 1)
    assert len(logits) == 1
    assert torch.equal(one.token_ids_BK, every.token_ids_BK[:, :1])
    assert (one.lengths_B.tolist(), every.lengths_B.tolist()) == ([1, 0, 1], [3, 0, 3])
    assert propose(speculator, states, [2, 0, 1], 0)[0].token_ids_BK.shape == (3, 0)
    with pytest.raises(SpeculatorsError, match="4 draft tokens asked for; this draft makes at most 3"):
        propose(speculator, states, [2, 2, 2], 4)


def test_the_cache_holds_nothing_and_moves_nothing() -> None:
    cache = random_speculator("medusa").draft.make_cache(4)
    assert (cache.keys, cache.num_slots) == ([], 4)
    cache.move(3, 0, 17)
