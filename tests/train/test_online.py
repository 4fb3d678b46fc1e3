"""Training on states that are made on the way is training on stored ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from speculators.errors import StoreError
from speculators.extract.local import LocalSource
from speculators.extract.online import OnlineSamples
from speculators.extract.prepared import PreparedData
from speculators.extract.store import HiddenStatesStore
from speculators.formats.hidden_states import HiddenStatesWriter
from speculators.runtime.verifier import Verifier
from speculators.train.recipe import DataConfig, ExtractConfig
from speculators.train.stages import Run
from tests.tiny_models import SENTENCES
from tests.train.test_stages import make_recipe

STAGES = ["prepare-data", "extract", "train"]


def run(verifier: Path, folder: Path, **how: Any) -> Run:
    folder.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20 : 40 + 8 * i]}]}
        for i, text in enumerate(SENTENCES)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = DataConfig(train=(str(folder / "rows.jsonl"),), max_length=128, validation_rows=2)
    extract = ExtractConfig(store_dtype="float32", dtype="float32", **how)
    # In bfloat16 the last bits of states, which depend on the rows beside them, turn roundings over.
    train = make_recipe(verifier, folder).train.model_copy(update={"compute_dtype": "float32"})
    recipe = make_recipe(verifier, folder, data=data, extract=extract, train=train, regenerate={})
    done = Run(recipe, progress=False)
    done.run(STAGES)
    return done


def losses(done: Run) -> list[float]:
    lines = (done.outputs.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [value for line in lines for name, value in json.loads(line).items() if "loss" in name]
    return [value for value in found if value is not None]


def check_same(online: Run, offline: Run) -> None:
    expected, got = losses(offline), losses(online)
    assert len(got) == len(expected) >= 4
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) <= 1e-5
    assert not online.outputs.states.exists()
    assert offline.outputs.states.is_dir()


@pytest.mark.parametrize("aux_dtype", [None, "int8"])
def test_losses_are_those_of_a_store(tiny_verifier: Path, tmp_path: Path, aux_dtype: str | None) -> None:
    offline = run(tiny_verifier, tmp_path / "offline", aux_dtype=aux_dtype)
    check_same(run(tiny_verifier, tmp_path / "online", online=True, aux_dtype=aux_dtype), offline)


def test_a_folder_of_files_trains_as_it_stands(tiny_verifier: Path, tmp_path: Path) -> None:
    offline = run(tiny_verifier, tmp_path / "offline")
    data = PreparedData(offline.outputs.prepared)
    layers = [*offline.speculator_config.aux_layer_ids, 8]
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    with HiddenStatesWriter(tmp_path / "files") as writer:
        for row in reversed(range(len(data))):
            ids, _ = data[row]
            states = verifier.capture([ids.tolist()], layers)[0]
            writer.submit(writer.reserve(f"r{row}"), states.contiguous(), ids, layers)
    files = {"source": "files", "files": str(tmp_path / "files"), "online": True}
    check_same(run(tiny_verifier, tmp_path / "online", **files), offline)
    # Imported, they are the same store again.
    imported = run(tiny_verifier, tmp_path / "imported", **{**files, "online": False})
    assert losses(imported) == pytest.approx(losses(offline), abs=1e-5)
    next((tmp_path / "files").glob("*.safetensors")).unlink()
    message = f"has files of {len(data) - 1} of the {len(data)} rows"
    with pytest.raises(StoreError, match=message):
        run(tiny_verifier, tmp_path / "fewer", **files)
    assert losses(run(tiny_verifier, tmp_path / "skipping", **files, skip_failed=True))


def test_sources_that_lack_something_are_refused_by_name() -> None:
    for how, message in (
        ({"source": "server"}, "source server needs endpoints"),
        ({"source": "files"}, "source files needs the folder"),
        ({"online": True, "skip_failed": True}, "skip_failed cannot be had with online"),
        ({"aux_dtype": "int4"}, "aux_dtype"),
        ({"source": "vllm", "vllm_keywords": {"model": "x"}}, "model cannot be given"),
    ):
        with pytest.raises(ValidationError, match=message):
            ExtractConfig(**how)


def test_samples_are_those_of_a_store(tiny_verifier: Path, tmp_path: Path) -> None:
    done = run(tiny_verifier, tmp_path / "run")
    layers = done.speculator_config.aux_layer_ids
    store = HiddenStatesStore.open(done.outputs.states, aux_layer_ids=layers)
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    source = LocalSource(verifier, store.identity)
    made = OnlineSamples(source, PreparedData(done.outputs.prepared), store.identity, layers)
    assert list(made.lengths) == list(store.lengths)
    for row in range(len(store)):
        for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states"):
            torch.testing.assert_close(getattr(made[row], name), getattr(store[row], name), atol=1e-5, rtol=0)
    with torch.no_grad():
        verifier.model.get_parameter("model.layers.3.mlp.up_proj.weight").fill_(float("inf"))
    with pytest.raises(StoreError, match="row 1: NaN or infinite states, first at token 0; leave the row out"):
        made[1]
