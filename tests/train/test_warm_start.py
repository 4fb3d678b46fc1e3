"""Drafts that start from a trained speculator, by recipe: their first loss is the one that it has on the same rows."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from speculators.errors import FormatError, TrainingError, UsageError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator
from speculators.models.warm_start import started_from
from speculators.train.dataset import PackedRows, split_rows
from speculators.train.metrics import read_metrics
from speculators.train.recipe import Recipe, run
from speculators.train.samples import open_samples, samples_identity
from speculators.train.stages import Run
from speculators.train.starting import make_speculator
from tests.train.test_family_recipes import make_recipe

STAGES = ["prepare-data", "extract", "train"]
# With every anchor that there is, a step draws nothing by chance.
ALL_ANCHORS = {"max_anchors": 512}
WIDE = {"row_length": 256, "measure_prompts": 0, "compute_dtype": "float32"}


def recipe_of(family: str, verifier: Path, folder: Path, **changes: Any) -> Recipe:
    """One step an epoch, over all rows."""
    folder.mkdir()
    recipe = make_recipe(family, verifier, folder)
    objective = {"objective": {**ALL_ANCHORS}} if "max_anchors" in type(recipe.objective).model_fields else {}
    train = recipe.train.model_copy(update=WIDE)
    settings = {**{key: getattr(recipe, key) for key in type(recipe).model_fields}, "train": train, **objective}
    return Recipe(**{**settings, **changes})


def trained(recipe: Recipe) -> Run:
    done = Run(recipe, progress=False)
    done.run(STAGES)
    return done


def first_loss(speculator: Speculator, run: Run) -> float:
    """The loss that the log has of the rows of the first step, without any training."""
    weights, recipe = load_verifier_weights(run.verifier), run.recipe
    with open_samples(run, samples_identity(run)) as samples:
        rows, _ = split_rows(samples, recipe.data.validation_rows, seed=recipe.train.seed)
        packed = PackedRows(rows, recipe.train.row_length, seed=recipe.train.seed, window=recipe.train.pack_window)
        batch = packed.batch(0, packed.steps(0, 1, 1)[0][0]).to("cpu", torch.float32)
    whole = speculator.attach_verifier(weights).to("cpu", torch.float32)
    objective: Any = recipe.objective
    with torch.no_grad():
        output = objective.step(whole.draft.train(), batch, VerifierHead.from_weights(weights))
    rate: float = output.metrics["loss"].rate
    return rate


@pytest.fixture(scope="module")
def sources(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A trained EAGLE-3 and a trained DFlash speculator."""
    folder = tmp_path_factory.mktemp("sources")
    return {family: trained(recipe_of(family, tiny_verifier, folder / family)) for family in ("eagle3", "dflash")}


def source_of(run: Run) -> str:
    return str(run.outputs.speculator)


@pytest.mark.parametrize("family", ["eagle3", "dflash"])
def test_the_first_loss_is_that_of_the_speculator_started_from(
    family: str, sources: dict[str, Run], tiny_verifier: Path, tmp_path: Path
) -> None:
    """Nothing of it is drawn or regressed anew, and its vocabulary map is kept with its weights (pitfall 33)."""
    source = source_of(sources[family])
    warm = trained(recipe_of(family, tiny_verifier, tmp_path / "warm", warm_start=source))
    given = Speculator.from_pretrained(source)
    assert (
        Speculator.from_pretrained(warm.outputs.speculator).vocab.draft_ids.tolist() == given.vocab.draft_ids.tolist()
    )
    # The data chooses no vocabulary where one is taken over.
    assert not (warm.outputs.prepared / "draft_vocab.safetensors").exists()
    losses = [line["loss"] for line in read_metrics(warm.outputs.out / "metrics.jsonl")]
    assert losses[0] == pytest.approx(first_loss(given, warm), abs=1e-5)
    before = [line["loss"] for line in read_metrics(sources[family].outputs.out / "metrics.jsonl")]
    assert losses[0] < before[0]
    assert losses[-1] < losses[0]


def test_dspark_goes_on_from_dflash(sources: dict[str, Run], tiny_verifier: Path, tmp_path: Path) -> None:
    """The shared part's tensors bit for bit, the heads as in a fresh draft of the same seed, and that draft's loss."""
    source = source_of(sources["dflash"])
    draft = sources["dflash"].recipe.draft.model_dump(exclude={"sample_from_anchor", "sliding_window_non_causal"})
    options = {**draft, "markov_rank": 8, "sample_from_anchor": False}
    recipe = recipe_of("dspark", tiny_verifier, tmp_path / "warm", draft=options, warm_start=source)
    warm = trained(recipe)
    given = Speculator.from_pretrained(source)
    start = make_speculator(warm, load_verifier_weights(tiny_verifier))
    tensors = start.draft.state_dict()
    for name, tensor in given.draft.state_dict().items():
        if not tensor.is_meta:
            assert torch.equal(tensors[name], tensor.to(tensors[name].dtype)), name
    fresh = {name for name in tensors if name.startswith(("markov_head.", "confidence_head."))}
    assert fresh == tensors.keys() - given.draft.state_dict().keys()
    assert tensors["markov_head.markov_w1.weight"].std() == pytest.approx(0.08, rel=0.1)
    assert not tensors["markov_head.markov_w2.weight"].any()
    assert {parameter.dtype for parameter in start.draft.trained_parameters()} == {torch.float32}
    losses = [line["loss"] for line in read_metrics(warm.outputs.out / "metrics.jsonl")]
    assert losses[0] == pytest.approx(first_loss(start, warm), abs=1e-5)
    assert losses[-1] < losses[0]
    assert Speculator.from_pretrained(warm.outputs.speculator).config.speculators_model_type == "dspark"


def without_weights(source: str, folder: Path) -> str:
    """A directory of which nothing but the configuration can be read."""
    folder.mkdir()
    (folder / "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    return str(folder)


@pytest.mark.parametrize(
    ("family", "override", "message"),
    [
        ("eagle3", "draft.draft_vocab_size=96", "draft_vocab_size is 96, that draft's 128"),
        ("eagle3", "draft.num_layers=2", "num_hidden_layers is 2, that draft's 1"),
        ("eagle3", "draft.aux_layer_ids=[1, 2]", r"_layer_ids is \[1, 2\], that draft's \[2, 4, 5\]"),
        ("eagle3", "draft.norm_output=false", "norm_output is False, that draft's True"),
        ("dflash", "draft.mask_token_id=7", "mask_token_id is 7, that draft's 383"),
    ],
)
def test_another_draft_is_refused_before_weights_are_read(
    family: str, override: str, message: str, sources: dict[str, Run], tiny_verifier: Path, tmp_path: Path, capsys: Any
) -> None:
    """Both values are named, by the plan too; neither side's weights are there."""
    source = without_weights(source_of(sources[family]), tmp_path / "source")
    verifier = without_weights(str(tiny_verifier), tmp_path / "verifier")
    recipe = recipe_of(family, Path(verifier), tmp_path / "run", warm_start=source)
    for words in (["--plan"], ["prepare-data"]):
        with pytest.raises(SystemExit) as ended:
            run(recipe, [*words, override])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert f"warm_start={source}" in error
        assert re.search(message, error), error
    run(recipe, ["--plan"])
    assert json.loads(capsys.readouterr().out)["recipe"]["warm_start"] == source


def test_another_family_is_refused(sources: dict[str, Run], tiny_verifier: Path, tmp_path: Path) -> None:
    recipe = recipe_of("dspark", tiny_verifier, tmp_path / "run", warm_start=source_of(sources["eagle3"]))
    with pytest.raises(UsageError, match="family 'eagle3'; expected one of family 'dspark' or family 'dflash'"):
        Run(recipe, progress=False).run(["prepare-data"])
    recipe = recipe_of("eagle3", tiny_verifier, tmp_path / "none", warm_start="verifier")
    with pytest.raises(FormatError, match="has no eagle3 block of its own to start from"):
        Run(recipe, progress=False).run(STAGES)


def test_how_far_attention_reaches_and_what_a_step_drafts_may_change(
    sources: dict[str, Run], tiny_verifier: Path, tmp_path: Path
) -> None:
    draft = {**sources["dflash"].recipe.draft.model_dump(), "block_size": 5, "sliding_window": 6}
    recipe = recipe_of("dflash", tiny_verifier, tmp_path / "run", draft=draft, warm_start=source_of(sources["dflash"]))
    given, weights = Speculator.from_pretrained(recipe.warm_start or ""), load_verifier_weights(tiny_verifier)
    start = started_from(given, Run(recipe, progress=False).speculator_config, weights)
    assert start.num_speculative_tokens == 4
    assert torch.equal(start.draft.state_dict()["fc.weight"], given.draft.state_dict()["fc.weight"].float())


def test_another_speculator_to_start_from_is_another_run(
    sources: dict[str, Run], tiny_verifier: Path, tmp_path: Path
) -> None:
    """A checkpoint of one start is not gone on with after another."""
    source = source_of(sources["eagle3"])
    done = trained(recipe_of("eagle3", tiny_verifier, tmp_path / "run", warm_start=source))
    other = Run(done.recipe.model_copy(update={"warm_start": None}), progress=False)
    with pytest.raises(TrainingError, match="made with other settings"):
        other.run(STAGES)
