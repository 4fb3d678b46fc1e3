import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from speculators.errors import FormatError, SpeculatorsError
from speculators.models.draft_model import DraftContext
from speculators.models.speculator import Speculator
from tests.models.drafts import HIDDEN, VOCAB, random_speculator, verifier_weights
from tests.models.eagle.dense import DenseDraft, rms, rope
from tests.models.serving import Argmax, greedy_proposal, random_inputs

GRID = [
    {"bias": bias, "qkv_bias": bias, "embed_layernorm": norms, "post_embedding_layernorm": norms, "num_layers": layers}
    for bias, norms, layers in itertools.product((False, True), (False, True), (1, 2))
]


def test_one_layer_without_an_input_norm_adds_its_residual_at_the_end() -> None:
    """Pitfall 11: fc([embedding ; state]) enters attention unnormed, hidden + residual leaves, and no norm follows."""
    speculator = random_speculator("eagle")
    w = dict(speculator.draft.named_parameters())
    (tokens,), (states,) = random_inputs(1, 5, HIDDEN, VOCAB)
    x = torch.cat((w["embed_tokens.weight"][tokens], states), -1) @ w["fc.weight"].T
    q, k, v = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = (part.unflatten(-1, (-1, 8)) for part in (q, k, v))
    q, k = rope(q, 10000.0), rope(k, 10000.0)
    heads = [((k[:, head // 2] @ q[-1, head]) / 8**0.5).softmax(0) @ v[:, head // 2] for head in range(4)]
    residual = x[-1] + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads)
    state = rms(residual, w["layers.0.post_attention_layernorm.weight"], 1e-6)
    gate, up = w["layers.0.mlp.gate_proj.weight"] @ state, w["layers.0.mlp.up_proj.weight"] @ state
    hidden = w["layers.0.mlp.down_proj.weight"] @ (F.silu(gate) * up)
    expected = verifier_weights().lm_head @ (hidden + residual)
    _, logits = greedy_proposal(speculator, tokens[None], states[None], [5], 1)
    torch.testing.assert_close(logits[0][0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", GRID, ids=str)
def test_biases_and_norms_are_there_where_their_flags_say_so(options: dict, tmp_path: Path) -> None:
    """Pitfall 34: the grid of biases and extra norms, with one and two layers, written, read, and computed by hand."""
    speculator = random_speculator("eagle", **options)
    speculator.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    assert ("fc.bias" in stored) is options["bias"]
    assert ("layers.0.self_attn.k_proj.bias" in stored) is options["bias"]
    assert {"embed_layernorm.weight", "post_embedding_layernorm.weight"} & stored.keys() == (
        {"embed_layernorm.weight", "post_embedding_layernorm.weight"} if options["embed_layernorm"] else set()
    )
    assert "layers.0.input_layernorm.weight" not in stored
    assert ("layers.1.input_layernorm.weight" in stored) is (options["num_layers"] == 2)
    assert not {name for name in stored if name.endswith("o_proj.bias") or name.startswith("lm_head")}
    loaded = Speculator.from_pretrained(tmp_path / "saved").attach_verifier(verifier_weights())
    (tokens,), (states,) = random_inputs(1, 6, HIDDEN, VOCAB)
    with torch.no_grad():
        proposal, logits = greedy_proposal(loaded, tokens[None], states[None], [6], 3)
        dense = DenseDraft(speculator)
        for step, shown in enumerate(logits):
            outputs = dense.outputs(states, tokens)
            expected = verifier_weights().lm_head @ outputs[-1]
            # Nothing norms these states, so that logits grow from step to step and their rounding with them.
            size = expected.abs().max()
            torch.testing.assert_close(shown[0] / size, expected / size, atol=1e-4, rtol=0)
            # Drafting goes on with what the head read, and the token that came of it.
            tokens, states = (
                torch.cat((tokens, proposal.token_ids_BK[0, step, None])),
                torch.cat((states, outputs[-1:])),
            )


def test_a_file_may_have_embeddings_of_its_own_but_no_head(tmp_path: Path) -> None:
    """The verifier's tensors are shared, stored as they are, or left out (pitfall 30)."""
    speculator = random_speculator("eagle")
    speculator.save_pretrained(tmp_path / "saved", dtype=torch.float32)
    file = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(file)
    assert {"embed_tokens.weight", "lm_head.weight"}.isdisjoint(tensors)
    own = torch.randn(VOCAB, HIDDEN)
    save_file(tensors | {"embed_tokens.weight": own}, file)
    loaded = Speculator.from_pretrained(tmp_path / "saved")
    assert loaded.draft.missing_tensors() == ["lm_head.weight"]
    loaded.attach_verifier(verifier_weights())
    assert torch.equal(loaded.draft.embed_tokens.weight, own)
    save_file(tensors | {"lm_head.weight": own}, file)
    with pytest.raises(FormatError, match=r"lm_head\.weight belongs to no part of the draft"):
        Speculator.from_pretrained(tmp_path / "saved")
    save_file(tensors | {"layers.0.input_layernorm.weight": torch.ones(HIDDEN)}, file)
    with pytest.raises(FormatError, match=r"layers\.0\.input_layernorm\.weight belongs to no part"):
        Speculator.from_pretrained(tmp_path / "saved")


def test_states_after_the_final_norm_are_asked_for() -> None:
    speculator = random_speculator("eagle")
    context = DraftContext(torch.tensor([[1, 2]]), None, [0], [2], speculator.draft.make_cache(1), slice(0, 1))
    with pytest.raises(SpeculatorsError, match="after its final norm; none were given"):
        speculator.draft.propose(context, 1, Argmax())


def test_a_fresh_draft_is_random_but_for_what_it_borrows() -> None:
    one, other = (random_speculator("eagle", bias=True, seed=seed) for seed in (1, 2))
    assert torch.equal(one.draft.lm_head.weight, verifier_weights().lm_head)
    assert not one.draft.lm_head.weight.requires_grad
    assert not one.draft.embed_tokens.weight.requires_grad
    assert not torch.equal(one.draft.fc.weight, other.draft.fc.weight)
    one.draft.reset_parameters(torch.Generator().manual_seed(0))
    assert one.draft.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (one.draft.fc.bias == 0).all()
    assert (one.draft.layers[0].post_attention_layernorm.weight == 1).all()
