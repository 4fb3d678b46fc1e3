"""Speculators that come from elsewhere and go elsewhere: the hub, and drafts that start from others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speculators.errors import FormatError
from speculators.models.speculator import Speculator
from tests.formats.fake_hub import OWNER, running_hub, with_client
from tests.models.drafts import config_of, draft_vocab, random_speculator, verifier_shape, verifier_weights

PUSH = """
import torch
from speculators.models.speculator import Speculator
from speculators.runtime.infer import infer

speculator = Speculator.from_pretrained(sys.argv[1])
report = {"acceptance_length": 2.5, "num_prompts": 3}
attempt("public", lambda: speculator.push_to_hub("org/draft", token="hf_owner", evaluations={"chat": report}))
attempt("branch", lambda: speculator.push_to_hub("org/draft", token="hf_owner", revision="wide", dtype=torch.float32))
attempt("nobody", lambda: speculator.push_to_hub("org/draft", token="hf_guest"))
for name, keywords in (("main", {}), ("wide", {"revision": "wide"})):
    back = Speculator.from_pretrained("org/draft", **keywords)
    back.save_pretrained(Path(sys.argv[2]) / name, next(back.draft.trained_parameters()).dtype)
attempt("absent", lambda: Speculator.from_pretrained("org/absent").config.to_json())
attempt("no revision", lambda: Speculator.from_pretrained("org/draft", revision="v9").config.to_json())
plan = infer("org/draft", None)
found["plan"] = [plan.verifier, plan.method, plan.num_speculative_tokens]
"""


def test_a_speculator_goes_to_the_hub_and_comes_back(tmp_path: Path) -> None:
    random_speculator().save_pretrained(tmp_path / "mine", torch.float32)
    with running_hub() as hub:
        found = with_client(hub, tmp_path / "home", PUSH, tmp_path / "mine", tmp_path / "back")
        repository = hub.repositories["org/draft"]
    assert found["public"].startswith(f"{hub.url}/org/draft/commit/")
    assert "the hub refused the token (HTTP 403)" in found["nobody"]["error"]
    assert "org/absent cannot be had" in found["absent"]["error"]
    assert "it has no revision 'v9'" in found["no revision"]["error"]
    assert found["plan"] == ["org/tiny", "eagle3", 3]
    card = repository.files()["README.md"].decode()
    assert 'base_model: "org/tiny"' in card
    assert "## Measured: chat" in card
    assert "vllm serve org/draft" in card
    exact = load_file(tmp_path / "mine" / "model.safetensors")
    for name, dtype in (("main", torch.bfloat16), ("wide", torch.float32)):
        back = load_file(tmp_path / "back" / name / "model.safetensors")
        assert back.keys() == exact.keys()
        for key, tensor in exact.items():
            assert torch.equal(back[key], tensor.to(dtype) if tensor.is_floating_point() else tensor), key
    assert not repository.private
    assert OWNER not in json.dumps(found)


def test_a_verifier_known_by_a_path_stays_here(tmp_path: Path) -> None:
    speculator = random_speculator(verifier={"name_or_path": str(tmp_path)})
    with pytest.raises(FormatError, match="write the verifier's hub id") as caught:
        speculator.push_to_hub("org/draft")
    assert caught.value.code == "F010"


def started(other: Speculator, **options: Any) -> Speculator:
    config = config_of("eagle3", verifier_shape(), options)
    return Speculator.create(config, verifier_weights(), seed=9, start_from=other)


@pytest.mark.parametrize("family", ["eagle3", "peagle", "dspark", "medusa", "mlp_speculator"])
def test_a_draft_starts_from_another_of_its_family(family: str) -> None:
    """Weights and vocabulary map are kept bit for bit, though another seed would draw others (pitfall 33)."""
    other = random_speculator(family)
    speculator = Speculator.create(other.config, verifier_weights(), seed=9, start_from=other)
    tensors = speculator.draft.state_dict()
    assert tensors.keys() == other.draft.state_dict().keys()
    for name, tensor in other.draft.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
        assert name in other.borrowed or tensors[name].data_ptr() != tensor.data_ptr(), name
    assert torch.equal(speculator.vocab.draft_ids, other.vocab.draft_ids)
    trained = [
        {name for name, one in side.draft.named_parameters() if one.requires_grad} for side in (speculator, other)
    ]
    assert trained[0] == trained[1]


def test_what_only_the_config_says_may_differ(tmp_path: Path) -> None:
    random_speculator().save_pretrained(tmp_path / "half")
    half = Speculator.from_pretrained(tmp_path / "half")
    speculator = started(half, norm_output=False, num_speculative_tokens=5)
    assert speculator.config.norm_output is False
    assert speculator.draft.dtype == torch.float32
    assert torch.equal(speculator.draft.fc.weight, half.draft.fc.weight.float())
    assert torch.equal(speculator.draft.embed_tokens.weight, half.draft.embed_tokens.weight.float())
    assert torch.equal(speculator.vocab.draft_ids, draft_vocab().draft_ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 2}, r"layers\.1\.input_layernorm\.weight is \[32\] in the new draft and is not there"),
        ({"norm_before_fc": False}, r"input_norm\.weight is not there in the new draft and is \[96\]"),
        ({"intermediate_size": 64}, r"mlp\.down_proj\.weight is \[32, 64\] in the new draft and is \[32, 48\]"),
        ({"aux_layer_ids": [2, 5]}, r"fc\.weight is \[32, 64\] in the new draft and is \[32, 96\]"),
    ],
)
def test_another_shape_is_refused_by_the_tensors_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        started(random_speculator(), **options)


def test_another_vocabulary_or_family_is_refused() -> None:
    """A vocabulary map stays with its weights (pitfall 33)."""
    other = random_speculator()
    with pytest.raises(FormatError, match="keeps 16 of 40 tokens; the config says 8 of 40"):
        started(other, draft_vocab_size=8)
    shifted = type(draft_vocab()).from_ids(range(4, 36, 2), 40)
    with pytest.raises(FormatError, match="keeps other tokens"):
        Speculator.create(other.config, verifier_weights(), shifted, start_from=other)
    with pytest.raises(FormatError, match="a eagle3 draft cannot start from a medusa"):
        other.copy_from(random_speculator("medusa"))
