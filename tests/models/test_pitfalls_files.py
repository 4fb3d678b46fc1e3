"""Faults 29 to 39 of `tests.models.pitfalls`, on every family: what a directory must hold, and what it must not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.errors import FormatError
from speculators.models import FAMILIES
from speculators.models.family import VerifierShape
from speculators.models.speculator import Speculator
from tests.models.drafts import VOCAB, config_of, draft_vocab, verifier_shape, verifier_weights
from tests.models.pitfalls import draft_of, every_family, options_of, whole_vocabulary

# Families that may propose a part of the verifier's tokens, and the tensor that says which.
MAPS = {"eagle3": "d2t", "peagle": "d2t", "dflash": "d2t", "dspark": "d2t", "medusa": "token_map"}
mapped_families = pytest.mark.parametrize(("family", "name"), MAPS.items())


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def refusal(directory: Path, tensors: dict[str, Tensor]) -> str:
    """What is said of the directory with these tensors instead of its own."""
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(FormatError) as caught:
        Speculator.from_pretrained(directory)
    return str(caught.value)


@every_family
def test_a_tensor_that_is_renamed_dropped_or_added_is_an_error(family: str, tmp_path: Path) -> None:
    """Never a warning with a random tensor in its place (pitfall 29)."""
    draft_of(family).save_pretrained(tmp_path, torch.float32)
    sound = tensors_of(tmp_path)
    required = {name for name, spec in draft_of(family).config.expected_tensors().items() if spec.required}
    assert required <= sound.keys()
    for name in sorted(required):
        rest = {key: tensor for key, tensor in sound.items() if key != name}
        assert f"{name} is missing" in refusal(tmp_path, rest), name
    name = min(required)
    said = refusal(tmp_path, {f"model.{key}" if key == name else key: tensor for key, tensor in sound.items()})
    assert f"{name} is missing" in said
    assert f"model.{name} belongs to no part" in said
    assert "surprise.weight belongs to no part" in refusal(tmp_path, sound | {"surprise.weight": torch.ones(3)})


@every_family
def test_what_is_the_verifiers_is_stored_bit_by_bit_or_not_at_all(family: str, tmp_path: Path) -> None:
    """Whether a file has an embedding of its own is told by the tensor's presence, not by its values (pitfall 30)."""
    config = config_of(family, verifier_shape(), options_of(family))
    weights = verifier_weights()
    vocab = draft_vocab(config.num_draft_ids) if config.num_draft_ids < VOCAB else None
    speculator = Speculator.create(config, weights, vocab)
    speculator.save_pretrained(tmp_path, torch.float32)
    stored = tensors_of(tmp_path)
    rows = slice(None) if vocab is None else vocab.draft_ids
    for name, theirs in (("embed_tokens.weight", weights.embed_tokens), ("lm_head.weight", weights.lm_head[rows])):
        assert name not in stored or torch.equal(stored[name], theirs), name
    loaded = Speculator.from_pretrained(tmp_path)
    assert not loaded.borrowed
    assert {name for name in loaded.draft.borrows if name in loaded.draft.state_dict()} == {
        *(name for name in loaded.draft.borrows if name in stored),
        *loaded.draft.missing_tensors(),
    }
    loaded.attach_verifier(weights)
    assert loaded.borrowed.isdisjoint(stored)
    assert loaded.draft.missing_tensors() == []


@mapped_families
def test_a_part_of_the_vocabulary_needs_its_map(family: str, name: str, tmp_path: Path) -> None:
    """Training does not start without one, and loading never takes 0..N-1 for it; a whole one has none (pitfall 31)."""
    config = config_of(family, verifier_shape(), options_of(family))
    assert config.num_draft_ids < VOCAB
    with pytest.raises(FormatError, match="the draft vocabulary keeps 40 of 40 tokens; the config says 16 of 40"):
        Speculator.create(config, verifier_weights())
    draft_of(family).save_pretrained(tmp_path / "part", torch.float32)
    sound = tensors_of(tmp_path / "part")
    assert name in sound
    absent = {key: tensor for key, tensor in sound.items() if key not in (name, "t2d")}
    assert name in refusal(tmp_path / "part", absent)
    whole = draft_of(family, **whole_vocabulary(family))
    whole.save_pretrained(tmp_path / "whole", torch.float32)
    assert name not in tensors_of(tmp_path / "whole")
    ids = torch.arange(VOCAB)
    assert torch.equal(Speculator.from_pretrained(tmp_path / "whole").vocab.to_verifier(ids), ids)


@mapped_families
def test_a_map_in_another_form_is_refused(family: str, name: str, tmp_path: Path) -> None:
    """Ids in place of offsets or the reverse, ids beyond the verifier's, a map that says nothing (pitfall 32)."""
    speculator = draft_of(family)
    speculator.save_pretrained(tmp_path, torch.float32)
    sound, ids, offsets = tensors_of(tmp_path), speculator.vocab.draft_ids, speculator.vocab.d2t
    assert torch.equal(sound[name], ids if name == "token_map" else offsets)
    reloaded = Speculator.from_pretrained(tmp_path).vocab
    assert torch.equal(torch.nonzero(reloaded.t2d).flatten(), ids)
    assert torch.equal(torch.arange(16) + reloaded.d2t, ids)
    other = offsets.flip(0) if name == "token_map" else ids
    for wrong in (other, sound[name] + VOCAB, torch.zeros_like(sound[name])):
        assert name in refusal(tmp_path, sound | {name: wrong})


@every_family
def test_how_the_verifier_is_stored_says_nothing_about_the_draft(family: str, tmp_path: Path) -> None:
    """A quantised verifier's draft is not quantised: its tensors are plain, whatever is copied (pitfall 39)."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "torch_dtype": "float8_e4m3fn",
    }
    shape = VerifierShape.from_config_dict(raw, "org/quantised")
    config = FAMILIES[family].draft(**options_of(family, **whole_vocabulary(family))).resolve(shape)
    written = config.to_json()
    layers = written.get("transformer_layer_config", {})
    assert not {"quantization_config", "compression_config"} & (written.keys() | layers.keys())
    assert written["dtype"] == "bfloat16"
    Speculator.create(config, verifier_weights()).save_pretrained(tmp_path)
    kinds = {tensor.dtype for tensor in tensors_of(tmp_path).values()}
    assert kinds == {torch.bfloat16}
