"""Embeddings and heads that are the draft's own: those that it trains, and those of a draft of another width."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.errors import FormatError, UsageError
from speculators.formats.verifier_weights import VerifierWeights
from speculators.models.eagle3.draft import Eagle3Draft
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.models.speculator import Speculator
from speculators.runtime.llm import LLM
from speculators.runtime.sampling import SamplingParams
from tests.models.drafts import (
    HIDDEN,
    VOCAB,
    draft_vocab,
    gradients,
    pack,
    random_speculator,
    verifier_head,
    verifier_shape,
    verifier_weights,
)
from tests.runtime.parts import random_speculator as speculator_for
from tests.runtime.parts import random_verifier

OWN = ("embed_tokens.weight", "lm_head.weight")


def test_heads_and_mlp_keep_the_proportions_of_the_verifier() -> None:
    shape = verifier_shape(
        hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=8, head_dim=128
    )
    layer = Eagle3Draft(hidden_size=1024).resolve(shape).transformer_layer_config
    # Eight heads of 128 fill the width; four of them share a key head, as the verifier's do.
    assert (layer.hidden_size, layer.intermediate_size) == (1024, 3072)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (8, 2, 128)
    wider = Eagle3Draft(hidden_size=3000).resolve(shape).transformer_layer_config
    assert (wider.intermediate_size, wider.num_attention_heads, wider.num_key_value_heads) == (9000, 23, 1)
    chosen = Eagle3Draft(
        hidden_size=1024, num_attention_heads=6, num_key_value_heads=3, head_dim=64, intermediate_size=100
    )
    layer = chosen.resolve(shape).transformer_layer_config
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (6, 3, 64)
    assert layer.intermediate_size == 100


def test_another_width_is_written_and_its_embeddings_are_trained() -> None:
    config = Eagle3Draft(hidden_size=16).resolve(verifier_shape())
    assert (config.target_hidden_size, config.verifier_hidden_size) == (HIDDEN, HIDDEN)
    assert config.embed_requires_grad
    assert config.to_json()["target_hidden_size"] == HIDDEN
    same = Eagle3Draft(hidden_size=HIDDEN).resolve(verifier_shape())
    assert (same.target_hidden_size, same.embed_requires_grad) == (None, False)
    with pytest.raises(UsageError, match=r"embeddings, 32 wide, do not fit hidden_size 16"):
        Eagle3Draft(hidden_size=16, embed_requires_grad=False).resolve(verifier_shape())


@pytest.mark.parametrize("draft_vocab_size", [16, None])
def test_a_draft_of_another_width_ships_embeddings_and_head(draft_vocab_size: int | None, tmp_path: Path) -> None:
    """vLLM leaves embeddings of another width uninitialised and takes the verifier's head whatever its shape."""
    speculator = random_speculator(hidden_size=16, draft_vocab_size=draft_vocab_size)
    expected = speculator.config.expected_tensors()
    assert [expected[name].shape for name in OWN] == [(VOCAB, 16), (draft_vocab_size or VOCAB, 16)]
    assert expected["fc.weight"].shape == (16, 3 * HIDDEN)
    assert all(expected[name].required for name in OWN)
    trained = {name for name, parameter in speculator.draft.named_parameters() if parameter.requires_grad}
    assert trained == set(dict(speculator.draft.named_parameters()))
    assert not speculator.borrowed
    speculator.save_pretrained(tmp_path, torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = Speculator.from_pretrained(tmp_path)
    assert loaded.draft.missing_tensors() == []
    for name in OWN:
        assert torch.equal(stored[name], speculator.draft.get_parameter(name))
        assert loaded.draft.get_parameter(name).requires_grad
        save_file({key: tensor for key, tensor in stored.items() if key != name}, tmp_path / "model.safetensors")
        with pytest.raises(FormatError, match=name):
            Speculator.from_pretrained(tmp_path)


def test_a_fresh_draft_of_another_width_starts_at_random_by_its_seed() -> None:
    config = Eagle3Draft(hidden_size=16, draft_vocab_size=16).resolve(verifier_shape())
    drafts = [Speculator.create(config, verifier_weights(), draft_vocab(16), seed=seed).draft for seed in (1, 1, 2)]
    for name in OWN:
        one, again, other = (draft.get_parameter(name).detach() for draft in drafts)
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert one.std().item() == pytest.approx(0.02, rel=0.2)


def test_trained_embeddings_start_as_a_copy_of_the_verifiers(tmp_path: Path) -> None:
    weights = verifier_weights()
    half = VerifierWeights(weights.embed_tokens.bfloat16(), weights.lm_head, weights.final_norm, 1e-6)
    config = Eagle3Draft(embed_requires_grad=True, draft_vocab_size=16).resolve(verifier_shape())
    speculator = Speculator.create(config, half, draft_vocab(16))
    table = speculator.draft.get_parameter("embed_tokens.weight")
    assert torch.equal(table, half.embed_tokens.float())
    assert table.dtype == torch.float32
    assert table.requires_grad
    assert "embed_tokens.weight" not in speculator.borrowed
    assert config.expected_tensors()["embed_tokens.weight"].required
    before = half.embed_tokens.clone()
    optimizer = torch.optim.SGD(list(speculator.draft.trained_parameters()), lr=1.0)
    Eagle3Objective().step(speculator.draft, pack([[0, 1, 1, 1, 1]], row=5), verifier_head()).loss.backward()
    optimizer.step()
    assert not torch.equal(table, before.float())
    assert torch.equal(half.embed_tokens, before)
    speculator.save_pretrained(tmp_path, torch.float32)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["embed_tokens.weight"], table)
    assert Speculator.from_pretrained(tmp_path).draft.missing_tensors() == []


def test_embeddings_in_the_dtype_of_training_are_not_the_verifiers_own() -> None:
    """A float32 verifier in process would otherwise be trained with its draft."""
    weights = verifier_weights()
    config = Eagle3Draft(embed_requires_grad=True, draft_vocab_size=16).resolve(verifier_shape())
    table = Speculator.create(config, weights, draft_vocab(16)).draft.get_parameter("embed_tokens.weight")
    assert torch.equal(table, weights.embed_tokens)
    assert table.data_ptr() != weights.embed_tokens.data_ptr()


def test_only_tokens_that_are_read_move_their_embeddings() -> None:
    """The row of each token that some step reads has a gradient, at later steps too; no other row has one."""
    speculator = random_speculator(embed_requires_grad=True)
    batch = pack([[0, 0, 0, 1, 1, 1, 0]], row=7)
    Eagle3Objective(ttt_steps=3).step(speculator.draft, batch, verifier_head()).loss.backward()
    moved = gradients(speculator.draft)["embed_tokens.weight"].abs().sum(-1).nonzero().flatten().tolist()
    # The last label is token 5, so that tokens 1 to 4 are read: token 1 as a key, token 5 and 6 never.
    assert set(moved) == set(batch.input_ids[0, 1:5].tolist())


def test_the_teacher_does_not_follow_a_trained_head() -> None:
    """A draft head that happens to hold the verifier's rows may stand in for them only while it is frozen."""
    speculator, batch, objective = random_speculator(), pack([[0, 1, 1, 1, 1, 1]], row=6), Eagle3Objective()
    speculator.draft.lm_head.requires_grad_(True)
    head = verifier_head()
    objective.step(speculator.draft, batch, head)
    with torch.no_grad():
        speculator.draft.lm_head.weight.mul_(0.5)
    moved = objective.step(speculator.draft, batch, head).loss
    torch.testing.assert_close(moved, Eagle3Objective().step(speculator.draft, batch, head).loss)


@pytest.mark.parametrize("options", [{"hidden_size": 16}, {"embed_requires_grad": True}])
def test_greedy_output_is_unchanged_in_the_runtime(options: dict) -> None:
    verifier = random_verifier(24)
    speculator = speculator_for(verifier, draft_vocab_size=12, **options)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[1, 2, 3], [7, 7, 1, 0, 9], [5]]
    plain = LLM.from_parts(verifier).generate(prompts, params, use_tqdm=False)
    llm = LLM.from_parts(verifier, speculator, num_speculative_tokens=3)
    drafted = llm.generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in drafted] == [one.outputs[0].token_ids for one in plain]
    assert llm.stats.num_draft_tokens > 0
