"""Verifiers of other kinds than plain dense decoders: mixtures of experts, sinks, latent attention, (1 + w) norms."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from speculators.errors import VerifierError
from speculators.formats.verifier_weights import VerifierWeights, load_verifier_weights
from speculators.models.cache import SlotWrite
from speculators.models.heads import VerifierHead
from speculators.runtime.verifier import Verifier
from tests.tiny_models import make_tokenizer
from tests.verifier_configs import HIDDEN, LAYERS, TINY, VOCAB

KINDS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma3_text", "qwen3_next")
IDS = torch.randint(3, VOCAB, (1, 13), generator=torch.Generator().manual_seed(1))


def random_model(kind: str) -> PreTrainedModel:
    """A model with norms far from 1 and weights wide enough for tokens to matter, in transformers' own attention."""
    model = AutoModelForCausalLM.from_config(TINY[kind](), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise.clamp(-1, 1) if "norm" in name else 0.2 * noise)
    return model


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_states_and_logits_are_the_models_own(kind: str, tmp_path: Path) -> None:
    """Pitfall 1, pitfall 2 and pitfall 7: states by depth, and the teacher's logits rebuilt from the last of them."""
    model = random_model(kind)
    expected = model(input_ids=IDS, output_hidden_states=True)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    verifier = Verifier.from_pretrained(tmp_path, dtype="float32", device="cpu")
    row = IDS[0].tolist()
    # Rows of one pass that share their beginning, the one that is compared among them.
    states_TAH = verifier.capture([row[:6] + row[:3], row, row[:5]], [0, 2, LAYERS])[1]
    assert states_TAH.shape == (IDS.shape[1], 3, HIDDEN)
    for index, depth in enumerate((0, 2)):
        torch.testing.assert_close(states_TAH[:, index], expected.hidden_states[depth][0], atol=1e-4, rtol=1e-4)
    for weights in (load_verifier_weights(tmp_path), VerifierWeights.from_model(verifier.model)):
        head = VerifierHead.from_weights(weights)
        torch.testing.assert_close(head.logits(states_TAH[:, 2]), expected.logits[0], atol=1e-4, rtol=1e-4)
        normed = expected.hidden_states[LAYERS][0]
        torch.testing.assert_close(head.norm(states_TAH[:, 2]), normed, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_tokens_that_come_in_pieces_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    expected = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    verifier = Verifier.from_pretrained(tmp_path, dtype="float32", device="cpu")
    cache, found = verifier.make_cache(1), []
    for start, end in ((0, 7), (7, 8), (8, 13)):
        write = SlotWrite.at(slice(0, 1), [start], end - start, verifier.device)
        found.append(verifier.forward(IDS[:, start:end], cache, write).logits_BTV)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)


def test_a_verifier_that_is_not_whole_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    """transformers fills in random numbers and goes on."""
    shutil.copytree(tiny_verifier, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(VerifierError, match=r"lacks 1 of its tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        Verifier.from_pretrained(tmp_path / "cut", dtype="float32", device="cpu")
