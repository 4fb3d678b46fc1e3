"""Training on states that are made on the way is training on stored ones."""

import json
from pathlib import Path

import pytest
import torch

from speculators.errors import StoreError
from speculators.extract.online import OnlineSamples
from speculators.extract.prepared import PreparedData
from speculators.extract.store import HiddenStatesStore
from speculators.runtime.verifier import Verifier
from speculators.train.recipe import DataConfig, ExtractConfig
from speculators.train.stages import Run
from tests.tiny_models import SENTENCES
from tests.train.test_stages import make_recipe

STAGES = ["prepare-data", "extract", "train"]


def run(verifier: Path, folder: Path, *, online: bool) -> Run:
    folder.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20 : 40 + 8 * i]}]}
        for i, text in enumerate(SENTENCES)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train=(str(folder / "rows.jsonl"),), max_length=128, validation_rows=2)
    extract = ExtractConfig(store_dtype="float32", dtype="float32", online=online)
    recipe = make_recipe(verifier, folder, data=data, extract=extract, regenerate={})
    done = Run(recipe, progress=False)
    done.run(STAGES)
    return done


def losses(done: Run) -> list[float]:
    lines = (done.outputs.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [value for line in lines for name, value in json.loads(line).items() if "loss" in name]
    return [value for value in found if value is not None]


def test_losses_are_those_of_a_store(tiny_verifier: Path, tmp_path: Path) -> None:
    offline = run(tiny_verifier, tmp_path / "offline", online=False)
    online = run(tiny_verifier, tmp_path / "online", online=True)
    expected, got = losses(offline), losses(online)
    assert len(got) == len(expected) >= 4
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) <= 1e-5
    assert not online.outputs.states.exists()
    assert offline.outputs.states.is_dir()


def test_samples_are_those_of_a_store(tiny_verifier: Path, tmp_path: Path) -> None:
    done = run(tiny_verifier, tmp_path / "run", online=False)
    layers = done.speculator_config.aux_layer_ids
    store = HiddenStatesStore.open(done.outputs.states, aux_layer_ids=layers)
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    made = OnlineSamples(verifier, PreparedData(done.outputs.prepared), layers, store_dtype="float32")
    assert list(made.lengths) == list(store.lengths)
    for row in range(len(store)):
        for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states"):
            torch.testing.assert_close(getattr(made[row], name), getattr(store[row], name), atol=1e-5, rtol=0)
    with torch.no_grad():
        verifier.model.get_parameter("model.layers.3.mlp.up_proj.weight").fill_(float("inf"))
    with pytest.raises(StoreError, match="row 1: the verifier's states are NaN or infinite"):
        made[1]
