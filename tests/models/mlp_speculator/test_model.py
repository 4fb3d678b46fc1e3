import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.errors import FormatError, SpeculatorsError
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, VOCAB, random_speculator
from tests.models.mlp_speculator.formula import logits_of
from tests.models.serving import greedy_proposal, random_inputs

OPTIONS = [
    {"tie_weights": tied, "scale_input": scaled, "inner_dim": inner, "n_predict": 4}
    for tied, scaled, inner in itertools.product((False, True), (False, True), (None, 24))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_drafts_are_those_of_the_formula(options: dict, num_tokens: int, tmp_path: Path) -> None:
    """Pitfall 35: tied or not, scaled or not, and fewer tokens than heads, which are then the first ones'."""
    random_speculator("mlp_speculator", **options).save_pretrained(tmp_path / "saved", dtype=torch.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    loaded = Speculator.from_pretrained(tmp_path / "saved")
    tokens, states = random_inputs(2, 3, HIDDEN, VOCAB)
    proposal, logits = greedy_proposal(loaded, tokens, states, [3, 2], num_tokens)
    assert len(logits) == num_tokens
    assert proposal.lengths_B.tolist() == [num_tokens] * 2
    for row, last in enumerate((2, 1)):
        given = [int(tokens[row, last]), *proposal.token_ids_BK[row, :-1].tolist()]
        expected = logits_of(loaded.config, stored, states[row, last], given)
        for step in range(num_tokens):
            torch.testing.assert_close(logits[step][row], expected[step], atol=1e-4, rtol=1e-4)
            assert proposal.token_ids_BK[row, step] == expected[step].argmax()


def test_a_tied_draft_is_stored_once_and_read_with_copies_too(tmp_path: Path) -> None:
    """Pitfall 35: whatever a writer does with shared tensors, one set of numbers is meant."""
    speculator = random_speculator("mlp_speculator", n_predict=4)
    speculator.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    file = tmp_path / "saved" / "model.safetensors"
    stored = load_file(file)
    assert sorted(stored) == [
        "emb.0.weight",
        "head.0.weight",
        "ln.0.bias",
        "ln.0.weight",
        "proj.0.weight",
        "proj.1.weight",
    ]
    copies = {name: stored[original].clone() for name, original in speculator.config.copies().items()}
    assert sorted(copies) == sorted(
        [f"{part}.{step}.{name}" for step in (1, 2, 3) for part, name in
         (("emb", "weight"), ("head", "weight"), ("ln", "weight"), ("ln", "bias"))]
        + ["proj.2.weight", "proj.3.weight"]
    )  # fmt: skip
    save_file(stored | copies, file)
    loaded = Speculator.from_pretrained(tmp_path / "saved")
    for name, tensor in loaded.draft.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    loaded.save_pretrained(tmp_path / "again", dtype=torch.float32)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == stored.keys()


@pytest.mark.parametrize("name", ["emb.2.weight", "ln.1.bias", "proj.2.weight", "head.3.weight"])
def test_copies_of_tied_weights_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    speculator = random_speculator("mlp_speculator", n_predict=4)
    speculator.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    stored = load_file(file)
    original = speculator.config.copies()[name]
    save_file(stored | {name: stored[original] + 1}, file)
    with pytest.raises(FormatError, match=f"{name} differs from {original} although tie_weights is true"):
        Speculator.from_pretrained(tmp_path / "saved")


def test_untied_steps_all_have_weights_of_their_own(tmp_path: Path) -> None:
    speculator = random_speculator("mlp_speculator", tie_weights=False, n_predict=4)
    speculator.save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    stored = load_file(file)
    assert len(stored) == 4 * 5
    del stored["ln.2.bias"]
    save_file(stored, file)
    with pytest.raises(FormatError, match=r"ln\.2\.bias is missing"):
        Speculator.from_pretrained(tmp_path / "saved")


def test_a_row_of_no_new_token_takes_no_part_and_more_tokens_than_steps_are_refused() -> None:
    speculator = random_speculator("mlp_speculator")
    tokens, states = random_inputs(2, 3, HIDDEN, VOCAB)
    every, _ = greedy_proposal(speculator, tokens, states, [3, 3], 3)
    some, _ = greedy_proposal(speculator, tokens, states, [3, 0], 3)
    assert some.lengths_B.tolist() == [3, 0]
    assert torch.equal(some.token_ids_BK[0], every.token_ids_BK[0])
    assert greedy_proposal(speculator, tokens, states, [3, 3], 0)[0].token_ids_BK.shape == (2, 0)
    with pytest.raises(SpeculatorsError, match="4 draft tokens asked for; this draft makes at most 3"):
        greedy_proposal(speculator, tokens, states, [3, 3], 4)


def test_a_fresh_draft_is_drawn_with_the_width_of_the_recurrence() -> None:
    speculator = random_speculator("mlp_speculator", inner_dim=64)
    speculator.draft.reset_parameters(torch.Generator().manual_seed(0))
    for name, parameter in speculator.draft.named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(1 / 8, rel=0.1), name
    assert (speculator.draft.ln[0].weight == 1).all()
    assert (speculator.draft.ln[0].bias == 0).all()


def test_half_precision_drafts_are_near() -> None:
    speculator = random_speculator("mlp_speculator")
    tokens, states = random_inputs(2, 3, HIDDEN, VOCAB)
    exact = greedy_proposal(speculator, tokens, states, [3, 3], 1)[1][0]
    rounded = greedy_proposal(speculator.to("cpu", torch.bfloat16), tokens, states, [3, 3], 1)[1][0]
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.02 * exact.norm()
