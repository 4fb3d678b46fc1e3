"""Block drafters, converted: same logits as a plain reference computed from the foreign tensors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.convert.options import ConversionVerifier
from speculators.convert.run import Conversion, convert
from speculators.errors import FormatError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.formats.vllm import validate_directory
from speculators.models import family_config
from speculators.models.draft_model import DraftContext
from speculators.models.speculator import Speculator
from tests.convert import layouts_block as layouts
from tests.convert import reference_block as reference
from tests.convert.converting import Spoken, converted, spoken_by
from tests.convert.foreign import Drawn, ForeignCheckpoint, prefixed
from tests.convert.layouts_block import CASES
from tests.convert.reference_block import Drafted, Foreign, Meaning
from tests.models.serving import Argmax

Make = Callable[[], ForeignCheckpoint]
FULL, BOTH_SEE = (None, None), (False, False)
# What each producer's own code does; an id of an output is one less than transformers' index.
PLAIN = Meaning((2, 4, 7), False, BOTH_SEE, FULL)
NEXT = Meaning((2, 4, 7), True, BOTH_SEE, FULL)
MEANINGS: dict[str, Meaning] = {
    "z-lab-dflash-nested": Meaning((2, 4, 7), False, (False, False, False), (None, None, None)),
    "z-lab-dflash-causal": Meaning((2, 4, 7), False, (True, True), FULL),
    "z-lab-dflash-windows": Meaning((2, 4, 7), False, (True, True), (4, 4)),
    "z-lab-dflash-mixed": Meaning((2, 4, 7), False, BOTH_SEE, (4, None)),
    "z-lab-dflash-unordered": Meaning((7, 2, 4), False, BOTH_SEE, FULL),
    # round(1 + i * 4 / 2) = 1, 3, 5 are outputs.
    "z-lab-dflash-no-ids": Meaning((2, 4, 6), False, BOTH_SEE, FULL),
    "modelopt-dflash-windows": Meaning((2, 4, 7), False, BOTH_SEE, (4, 4)),
    "deepspec-dflash": NEXT,
    "deepspec-dspark-embeddings": Meaning((0, 3, 7), True, BOTH_SEE, FULL),
}


def meaning_of(case: ForeignCheckpoint) -> Meaning:
    return MEANINGS.get(case.layout, NEXT if "dspark" in case.layout else PLAIN)


@pytest.fixture(scope="module")
def spoken(tiny_verifier: Path) -> Spoken:
    return spoken_by(tiny_verifier, layouts.VOCAB)


def drafted(directory: Path, verifier: Path, tokens: Tensor, hidden_states: tuple[Tensor, ...]) -> Drafted:
    """What the converted draft proposes after `tokens`, a whole block."""
    speculator = Speculator.from_pretrained(directory, dtype=torch.float32)
    speculator.attach_verifier(load_verifier_weights(verifier))
    draft, sampler = speculator.draft, Argmax()
    context = DraftContext(
        token_ids_BT=tokens[None, 1:],
        aux_hidden_states_BTX=torch.cat([hidden_states[depth][:-1] for depth in draft.aux_layer_ids], -1)[None],
        starts=[0],
        lengths=[len(tokens) - 1],
        cache=draft.make_cache(1),
        rows=slice(0, 1),
    )
    proposal = draft.propose(context, speculator.num_speculative_tokens, sampler)
    sure = [] if proposal.confidence_BK is None else list(proposal.confidence_BK[0])
    return Drafted([logits[0] for logits in sampler.logits], proposal.token_ids_BK[0].tolist(), sure)


def expected(case: ForeignCheckpoint, verifier: Path, spoken: Spoken) -> Drafted:
    weights = load_verifier_weights(verifier)
    return reference.drafted(Foreign(case, weights.embed_tokens, weights.lm_head), *spoken, meaning_of(case))


def assert_same(got: Drafted, wanted: Drafted) -> None:
    assert got.tokens == wanted.tokens
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-5, atol=1e-5)
    assert len(got.confidence) == len(wanted.confidence)
    for mine, theirs in zip(got.confidence, wanted.confidence, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_converted_draft_computes_what_its_producer_means(
    make: Make, tiny_verifier: Path, spoken: Spoken, tmp_path: Path
) -> None:
    case = make()
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert sorted([*plan.used, *plan.dropped]) == sorted(case.tensors)
    slots = layouts.BLOCK if meaning_of(case).next_token else layouts.BLOCK - 1
    faults = {item.slug for item in validate_directory(tmp_path / "ours", family_config) if item.level == "ERROR"}
    # vLLM has neither Markov heads of these kinds nor a DFlash draft that samples from its anchor.
    assert faults <= {"markov-head", "anchor-sampling"}
    wanted = expected(case, tiny_verifier, spoken)
    assert len(wanted.tokens) == slots
    assert_same(drafted(tmp_path / "ours", tiny_verifier, *spoken), wanted)


def written(conversion: Conversion) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((conversion.directory / "config.json").read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_reference_that_reads_another_layer_is_told_apart(
    index: int, tiny_verifier: Path, spoken: Spoken, tmp_path: Path
) -> None:
    case = layouts.zlab()
    converted(case, tmp_path, tiny_verifier)
    got = drafted(tmp_path / "ours", tiny_verifier, *spoken)
    weights = load_verifier_weights(tiny_verifier)
    features = list(PLAIN.features)
    features[index] -= 1
    foreign = Foreign(case, weights.embed_tokens, weights.lm_head)
    other = reference.drafted(foreign, *spoken, replace(PLAIN, features=tuple(features)))
    assert (torch.stack(got.logits) - torch.stack(other.logits)).abs().max() > 1e-2


def test_layer_ids_are_reported_as_read_and_as_written(tiny_verifier: Path, tmp_path: Path) -> None:
    report = converted(layouts.zlab_unordered(), tmp_path / "a", tiny_verifier)
    assert report.to_json()["ids"] == {
        "read": (6, 1, 3),
        "written": (7, 2, 4),
        "source": "dflash_config.target_layer_ids",
    }
    assert written(report)["aux_hidden_state_layer_ids"] == [2, 4, 7]
    assert "columns in the order of depths [2, 4, 7]" in report.plan.derived["fc.weight"]
    report = converted(layouts.zlab_default_ids(), tmp_path / "b", tiny_verifier)
    assert report.to_json()["ids"]["source"] == "default"
    assert any("no layer ids are written" in note for note in report.plan.notes)


def test_options_stand_above_the_file(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.zlab()
    case.options = {
        "aux_layer_ids": [2, 5, 8],
        "speculative_tokens": 2,
        "mask_token_id": 7,
        "block_size": 6,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "dtype": "bfloat16",
    }
    config = written(converted(case, tmp_path, tiny_verifier))
    assert config["aux_hidden_state_layer_ids"] == [2, 5, 8]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 2
    assert (config["mask_token_id"], config["block_size"]) == (7, 6)
    assert (config["sample_from_anchor"], config["sliding_window_non_causal"]) == (True, False)
    assert config["dtype"] == "bfloat16"


def test_ids_that_are_said_to_be_depths_are_not_moved(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.zlab()
    case.options = {"layer_ids_mean": "depth"}
    assert written(converted(case, tmp_path, tiny_verifier))["aux_hidden_state_layer_ids"] == [1, 3, 6]


def test_the_kind_of_a_markov_head_is_the_tensors_where_it_is_not_written(tiny_verifier: Path, tmp_path: Path) -> None:
    for make, kind in ((layouts.modelopt_vanilla, "vanilla"), (layouts.modelopt_gated, "gated")):
        case = make()
        del case.config["dflash_config"]["markov_head_type"], case.config["dflash_config"]["markov_rank"]
        config = written(converted(case, tmp_path / kind, tiny_verifier))
        assert (config["markov_head_type"], config["markov_rank"]) == (kind, layouts.RANK)
        assert config["sample_from_anchor"] is True


def test_a_dspark_draft_with_windows_is_causal_in_them(tiny_verifier: Path, spoken: Spoken, tmp_path: Path) -> None:
    case = layouts.deepspec_vanilla()
    case.config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    converted(case, tmp_path / "a", tiny_verifier)
    weights = load_verifier_weights(tiny_verifier)
    foreign = Foreign(case, weights.embed_tokens, weights.lm_head)
    wanted = reference.drafted(foreign, *spoken, replace(NEXT, causal=(True, False), windows=(4, None)))
    assert_same(drafted(tmp_path / "a" / "ours", tiny_verifier, *spoken), wanted)
    case.config["is_causal"] = True
    converted(case, tmp_path / "b", tiny_verifier)
    wanted = reference.drafted(foreign, *spoken, replace(NEXT, causal=(True, True), windows=(4, None)))
    assert_same(drafted(tmp_path / "b" / "ours", tiny_verifier, *spoken), wanted)


@pytest.mark.parametrize("make", [layouts.deepspec_vanilla, layouts.deepspec_dflash])
def test_embeddings_and_head_of_the_verifier_are_left_to_it(
    make: Make, tiny_verifier: Path, spoken: Spoken, tmp_path: Path
) -> None:
    weights = load_verifier_weights(tiny_verifier)
    case = make()
    case.tensors |= {"embed_tokens.weight": weights.embed_tokens.clone(), "lm_head.weight": weights.lm_head.clone()}
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert set(plan.dropped) == {"embed_tokens.weight", "lm_head.weight"}
    assert all("equal to the verifier's" in reason for reason in plan.dropped.values())
    assert_same(drafted(tmp_path / "ours", tiny_verifier, *spoken), expected(case, tiny_verifier, spoken))


@pytest.mark.parametrize("holder", ["alone", "with its token"])
def test_a_mask_token_may_have_an_embedding_of_its_own(
    holder: str, tiny_verifier: Path, spoken: Spoken, tmp_path: Path
) -> None:
    case, row = layouts.zlab(), Drawn(40).bias(layouts.WIDTH)
    source = case.write(tmp_path / "foreign")
    held = row if holder == "alone" else {"embedding": row, "mask_token_id": layouts.MASK}
    torch.save(held, source / "mask_embedding.pt")
    plan = convert(source, tmp_path / "ours", verifier=ConversionVerifier(str(tiny_verifier))).plan
    assert "mask_embedding.pt" in plan.used
    assert plan.derived["embed_tokens.weight"] == "the verifier's embeddings, row 380 from mask_embedding.pt"
    weights = load_verifier_weights(tiny_verifier)
    table = weights.embed_tokens.clone()
    table[layouts.MASK] = row
    wanted = reference.drafted(Foreign(case, table, weights.lm_head), *spoken, PLAIN)
    assert_same(drafted(tmp_path / "ours", tiny_verifier, *spoken), wanted)
    assert wanted.tokens != expected(case, tiny_verifier, spoken).tokens


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ({"embedding": torch.ones(64), "mask_token_id": 5}, "is for token 5"),
        (torch.ones(32), r"expected 64 numbers"),
        ({"weights": torch.ones(64)}, "holds NoneType"),
        ({"embedding": torch.ones(64), "hook": Path("x")}, "cannot be read as plain tensors"),
    ],
)
def test_a_mask_embedding_that_does_not_fit_is_refused(
    held: object, text: str, tiny_verifier: Path, tmp_path: Path
) -> None:
    source = layouts.zlab().write(tmp_path / "foreign")
    torch.save(held, source / "mask_embedding.pt")
    with pytest.raises(FormatError, match=text):
        convert(source, tmp_path / "ours", verifier=ConversionVerifier(str(tiny_verifier)))
    assert not (tmp_path / "ours").exists()


def test_keys_that_nothing_reads_are_told(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.zlab()
    case.config["colour"] = "blue"
    assert "keys of config.json that nothing here reads: colour" in converted(case, tmp_path, tiny_verifier).plan.notes


def test_a_confidence_head_without_a_markov_head_is_left_out_and_said(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.deepspec_dflash()
    case.config["enable_confidence_head"] = True
    case.tensors |= prefixed(layouts.confidence(Drawn(41), layouts.WIDTH), "confidence_head.proj.")
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert plan.dropped.keys() == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert any("which vLLM refuses of DFlash drafts" in note for note in plan.notes)


def test_the_drafters_own_window_stands_above_the_layers(tiny_verifier: Path, tmp_path: Path) -> None:
    case = layouts.zlab_windows()
    case.config["dflash_config"]["swa_window_size"] = 3
    assert written(converted(case, tmp_path, tiny_verifier))["transformer_layer_config"]["sliding_window"] == 3
