"""A verifier's own MTP block, trained on from a recipe without the verifier's layers, and put back where it was."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from speculators.convert.export import export
from speculators.errors import FormatError, VerifierError
from speculators.formats.checkpoint import INDEX, read_headers
from speculators.formats.mtp_names import deepseek_layout
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.family import VerifierShape
from speculators.models.mtp.draft import MtpDraft
from speculators.models.mtp.native import from_native, to_native
from speculators.models.speculator import Speculator
from speculators.train.metrics import read_metrics
from speculators.train.recipe import EvaluateConfig, Recipe
from speculators.train.stages import STAGES, Run
from tests.models.drafts import randomize
from tests.models.mtp.verifiers import RAW
from tests.tiny_models import make_tokenizer
from tests.train.test_family_recipes import make_recipe
from tests.train.test_warm_start import WIDE, first_loss

ENDS, LAYERS, BLOCK = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
LAYOUT = deepseek_layout(4)
Parts = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """A random DeepSeek-V3 of four layers in three files (ends, layers, MTP block), and the tensors of that block.

    The tensors are named as ours; in the file experts stand one by one, as published checkpoints have them.
    """
    folder, tokenizer = tmp_path_factory.mktemp("deepseek"), make_tokenizer()
    raw = {key: value for key, value in RAW["deepseek"].items() if key not in ("quantization_config", "auto_map")}
    raw |= {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    config = MtpDraft().resolve(VerifierShape.from_config_dict(json.loads((folder / "config.json").read_text()), "v"))
    block = Speculator.create(config, load_verifier_weights(folder), seed=9)
    randomize(block, seed=9, deviation=0.05)
    ours = {name: tensor for name, tensor in block.draft.state_dict().items() if name.startswith("mtp_layers.")}
    experts = config.transformer_layer_config.num_routed_experts
    native = to_native(LAYOUT.native_origins(ours, experts), ours)
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.")}
    parts = {ENDS: {name: tensors[name] for name in tensors.keys() - layers.keys()}, LAYERS: layers, BLOCK: native}
    for file, held in parts.items():
        held = {name: tensor.detach().clone().contiguous() for name, tensor in held.items()}
        save_file(held, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    return folder, {name: tensor.detach().clone() for name, tensor in ours.items()}


def recipe_of(verifier: Path, folder: Path, **changes: Any) -> Recipe:
    folder.mkdir(exist_ok=True)
    recipe = make_recipe("mtp", verifier, folder)
    train = recipe.train.model_copy(update=WIDE)
    settings = {**{key: getattr(recipe, key) for key in type(recipe).model_fields}, "train": train}
    return Recipe(**{**settings, "warm_start": "verifier", **changes})


@pytest.fixture(scope="module")
def tuned(verifier: Parts, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Extracted with the whole verifier, trained through to the card where the file of its layers is not."""
    folder = tmp_path_factory.mktemp("run")
    here = folder / "verifier"
    shutil.copytree(verifier[0], here)
    done = Run(recipe_of(here, folder, evaluate=EvaluateConfig()), progress=False)
    done.run(["prepare-data", "extract"])
    (here / LAYERS).unlink()
    done.run(list(STAGES))
    return done


def test_training_needs_none_of_the_verifiers_layers(tuned: Run, verifier: Parts) -> None:
    """It begins with the verifier's own block, whose loss the first line of the log is, and leaves it behind."""
    with pytest.raises(OSError, match=LAYERS):
        AutoModelForCausalLM.from_pretrained(tuned.verifier)
    assert "Family `mtp`" in (tuned.outputs.speculator / "README.md").read_text(encoding="utf-8")
    losses = [line["loss"] for line in read_metrics(tuned.outputs.out / "metrics.jsonl")]
    native = Speculator.create(tuned.speculator_config, load_verifier_weights(tuned.verifier))
    native.draft.load_state_dict(verifier[1], strict=False)
    assert losses[0] == pytest.approx(first_loss(native, tuned), abs=1e-5)
    assert losses[-1] < losses[0]
    saved = Speculator.from_pretrained(tuned.outputs.speculator).draft.state_dict()
    required = {name for name, spec in tuned.speculator_config.expected_tensors().items() if spec.required}
    assert verifier[1].keys() == required
    assert {name for name in required if not torch.equal(saved[name].float(), verifier[1][name])} == required - {
        # The offsets of a router are no parameters.
        "mtp_layers.0.mlp.gate.e_score_correction_bias"
    }


def test_the_block_goes_back_under_the_names_that_engines_read(tuned: Run, verifier: Parts, tmp_path: Path) -> None:
    """Every other tensor and file stays as it is (pitfall 37)."""
    speculator = Speculator.from_pretrained(tuned.outputs.speculator)
    export(tuned.outputs.speculator, "native-mtp", tmp_path / "stitched", verifier=str(verifier[0]))
    before, after = (
        {name: tensor for file in (ENDS, LAYERS, BLOCK) for name, tensor in load_file(folder / file).items()}
        for folder in (verifier[0], tmp_path / "stitched")
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("model.layers.4.") for name in changed)
    ours = from_native(LAYOUT.origins(after), after.__getitem__)
    trained = speculator.draft.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor, trained[name].float()), name
    assert (tmp_path / "stitched" / "config.json").read_bytes() == (verifier[0] / "config.json").read_bytes()
    assert (tmp_path / "stitched" / LAYERS).samefile(verifier[0] / LAYERS)
    assert not (tmp_path / "stitched" / BLOCK).samefile(verifier[0] / BLOCK)
    assert read_headers(tmp_path / "stitched").keys() == before.keys()
    with pytest.raises(FormatError, match="is there already; give a new directory"):
        export(tuned.outputs.speculator, "native-mtp", tmp_path / "stitched", verifier=str(verifier[0]))


def test_what_is_missing_is_named(verifier: Parts, tuned: Run, tiny_verifier: Path, tmp_path: Path) -> None:
    shutil.copytree(verifier[0], tmp_path / "without")
    index = json.loads((verifier[0] / INDEX).read_text(encoding="utf-8"))
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != BLOCK}
    (tmp_path / "without" / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(FormatError, match="has no MTP block to replace"):
        export(tuned.outputs.speculator, "native-mtp", tmp_path / "stitched", verifier=str(tmp_path / "without"))
    shutil.copytree(verifier[0], tmp_path / "verifier")
    (tmp_path / "verifier" / ENDS).unlink()
    message = rf"{ENDS}, which has model\.embed_tokens\.weight, is missing; fetch it"
    with pytest.raises(VerifierError, match=message):
        load_verifier_weights(tmp_path / "verifier")
    with pytest.raises(FormatError, match="has no mtp block of its own to start from"):
        Run(recipe_of(tiny_verifier, tmp_path / "plain"), progress=False).run(["prepare-data", "extract", "train"])


def test_a_block_with_a_head_of_its_own_is_refused(verifier: Parts, tuned: Run, tmp_path: Path) -> None:
    """A head that repeats the verifier's is passed over, another is nothing that the draft could have."""
    shutil.copytree(verifier[0], tmp_path / "verifier")
    weights = load_verifier_weights(verifier[0])
    block, index = load_file(verifier[0] / BLOCK), json.loads((verifier[0] / INDEX).read_text(encoding="utf-8"))
    name = "model.layers.4.shared_head.head.weight"
    index["weight_map"][name] = BLOCK
    (tmp_path / "verifier" / INDEX).write_text(json.dumps(index), encoding="utf-8")
    draft = Speculator.create(tuned.speculator_config, weights).draft
    for head, refused in ((weights.lm_head.clone(), False), (weights.lm_head + 1, True)):
        save_file({**block, name: head}, tmp_path / "verifier" / BLOCK, metadata={"format": "pt"})
        if refused:
            with pytest.raises(FormatError, match="is another than the verifier's lm_head"):
                draft.native_tensors(tmp_path / "verifier", weights)
        else:
            assert draft.native_tensors(tmp_path / "verifier", weights).keys() == verifier[1].keys()
