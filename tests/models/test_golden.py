"""Loss and every gradient norm of checkpoints that independent software wrote and computed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculators.errors import DataError, UsageError
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.losses import TERMS, VerifierHead
from speculators.models.speculator import Speculator
from tests.golden.run import compute
from tests.golden.settings import SETTINGS, loss_terms, read_case
from tests.golden.variants import ROWS, VARIANTS, build, write_row
from tests.models.eagle3.dense import DenseDraft

GOLDEN = Path(__file__).parent.parent / "golden"
INPUTS = GOLDEN / "golden_inputs.safetensors"


def read(name: str) -> dict[str, dict]:
    found: dict[str, dict] = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    return found


CASES, FURTHER = read("golden.json"), read("further.json")


def agree(found: dict, expected: dict) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of `variants.py`, and those kept here, beside their verifier."""
    parent = tmp_path_factory.mktemp("golden")
    for name in {case.partition("|")[0] for case in FURTHER}:
        build(name, parent)
    for row in ROWS:
        write_row(row, parent)
    return parent


def test_every_family_with_numbers_is_among_them() -> None:
    assert {case.partition("|")[0] for case in CASES} == set(SETTINGS)
    bases = {VARIANTS[name].base if name in VARIANTS else name for name in (case.partition("|")[0] for case in FURTHER)}
    assert bases == set(SETTINGS)
    assert {case.partition("|")[0] for case in FURTHER} >= set(VARIANTS)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_norms(case: str) -> None:
    agree(compute(GOLDEN / case.partition("|")[0], INPUTS, case), CASES[case])


@pytest.mark.parametrize("case", FURTHER)
def test_loss_and_gradient_norms_of_other_settings_and_shapes(case: str, folders: Path) -> None:
    key, _, row = case.partition("@")
    inputs = folders / f"{row}.safetensors" if row else INPUTS
    agree(compute(folders / key.partition("|")[0], inputs, key), FURTHER[case])


def test_accuracy_counts() -> None:
    case = next(case for case in CASES if case.startswith("eagle3|") and "kl_div" in case)
    found = compute(GOLDEN / "eagle3", INPUTS, case)["metrics"]
    expected = CASES[case]["metrics"]
    for step in range(3):
        assert found[f"full_acc_{step}"][0] == expected[f"full_acc_{step}_sum"]
        assert tuple(found[f"cond_acc_{step}"]) == (
            expected[f"cond_acc_{step}_sum"],
            expected[f"cond_acc_{step}_total"],
        )
        # The golden sums hold the mean over supervised positions, weighted by the step's decay.
        total, count = found[f"loss_{step}"]
        assert 0.8**step * total / count == pytest.approx(expected[f"loss_{step}_sum"], rel=1e-5)


def test_a_full_vocabulary_borrows_embeddings_and_head_from_the_verifier(tmp_path: Path) -> None:
    """Against the dense twin of EAGLE-3, on a folder that has neither `embed_tokens` nor `lm_head` nor a map."""
    folder = build("eagle3_full", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith(("embed_tokens", "lm_head"))}
    save_file(left, folder / "model.safetensors")
    # Without windows: the twin counts them from the query, as servers do, the golden numbers from its first step.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["transformer_layer_config"] |= {"layer_types": ["full_attention"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = compute(folder, INPUTS, 'eagle3_full|{"ttt_steps": 3, "ttt_step_loss_decay": 0.7, "loss_fn": "kl_div"}')

    weights = load_verifier_weights(tmp_path / "verifier")
    speculator = Speculator.from_pretrained(folder, dtype=torch.float32).attach_verifier(weights)
    assert speculator.vocab.is_full
    inputs = load_file(INPUTS)
    # The twin pairs features t with token t + 1; the inputs are paired already.
    tokens = torch.cat((torch.zeros(1, dtype=torch.int64), inputs["input_ids"][0]))
    twin = DenseDraft(speculator)
    twin.tensors["embed_tokens.weight"] = weights.embed_tokens.float()
    logits = twin.unroll(inputs["hidden_states"][0].float(), tokens, 3)
    head = VerifierHead.from_weights(weights).to("cpu", torch.float32)
    teacher = head.logits(inputs["verifier_last_hidden_states"][0].float())
    mask, loss = inputs["loss_mask"][0].bool(), torch.zeros(())
    for step, rows in enumerate(logits):
        kept = mask[step:]
        log_p, log_q = teacher[step:][kept].log_softmax(-1), rows[: len(kept)][kept].log_softmax(-1)
        loss = loss + 0.7**step * (log_p.exp() * (log_p - log_q)).sum() / kept.sum()
    loss.backward()
    trained = {name: item for name, item in speculator.draft.named_parameters() if item.requires_grad}
    agree(found, {"loss": loss.item(), "grad_norms": {name: item.grad.norm().item() for name, item in trained.items()}})


@pytest.mark.parametrize(
    ("family", "case", "message"),
    [
        ("eagle3", 'x|{"tts": 3}', "tts is no setting of eagle3; expected loss_fn, ttt_steps"),
        ("mtp", 'x|{"loss_fn": "ce"}', "loss_fn is no setting of mtp"),
        ("eagle3", 'x|{"loss_implementation": "exact"}', "loss_implementation is 'exact'; expected eager or fused"),
        ("eagle3", 'x|{"ttt_steps": 0}', "ttt_steps is 0; expected a positive integer"),
        ("eagle3", 'x|{"ttt_steps": true}', "ttt_steps is True; expected a positive integer"),
        ("eagle3", 'x|{"ttt_step_loss_decay": NaN}', "ttt_step_loss_decay is nan"),
        ("dflash", 'x|{"per_position_loss_weight": "linear"}', "expected fixed-exp-decay or dpace"),
        ("dflash", 'x|{"gamma": 4, "dflash_decay_gamma": 4}', "same setting"),
        ("dflash", 'x|{"loss_fn": "mse"}', "loss_fn names 'mse'; expected kl_div"),
        ("dflash", 'x|{"loss_fn": {"ce": 1, "tv": "half"}}', "gives 'tv' the weight 'half'"),
        ("dflash", 'x|{"loss_fn": {"rkl": 1, "reverse_kl": 1}}', "gives 'reverse_kl' the weight"),
        ("dflash", 'x|{"loss_fn": {}}', "has no losses"),
        ("dflash", 'x|{"loss_fn": {"ce": 0}}', "has no losses"),
        ("dspark", "x|[]", "expected a JSON object"),
        ("dspark", "dspark", "expected '<folder>|<settings as JSON>'"),
    ],
)
def test_a_setting_that_is_not_known_is_refused(family: str, case: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_case(case, family)
    assert message in str(caught.value)


@pytest.mark.parametrize("written", ["kl_div", *TERMS, "rkl", "jsd"])
def test_losses_are_understood_by_name(written: str) -> None:
    (name,) = loss_terms(written)
    assert name in TERMS
    assert loss_terms(json.dumps({written: 0.5})) == loss_terms({written: 0.5}) == {name: 0.5}


def test_settings_of_the_other_software_that_change_nothing() -> None:
    plain = read_case('dflash|{"loss_fn": "ce"}', "dflash")
    written = {"loss_fn": '{"ce": 1, "tv": 0.0}', "per_position_loss_weight": None, "loss_implementation": "fused"}
    assert (
        read_case(f"dflash|{json.dumps(written)}", "dflash")
        | {
            "per_position_loss_weight": "fixed-exp-decay",
            "loss_implementation": "eager",
        }
        == plain
    )


def test_mtp_steps_that_a_key_leaves_out(folders: Path) -> None:
    """They are the folder's, or as many as there are weights."""
    expected = FURTHER['mtp_2|{"num_speculative_steps": 2}']
    agree(compute(folders / "mtp_2", INPUTS, "mtp_2|{}"), expected)
    agree(compute(folders / "mtp", INPUTS, 'mtp|{"step_weights": [0.625, 0.375]}'), expected)
    with pytest.raises(UsageError, match="step_weights has 1 entries; expected 3"):
        compute(folders / "mtp", INPUTS, 'mtp|{"step_weights": [1], "num_speculative_steps": 3}')


def test_a_verifier_beside_the_inputs_or_behind_a_link(tmp_path: Path) -> None:
    case = 'mtp|{"num_speculative_steps": 3}'
    (tmp_path / "link").symlink_to(GOLDEN / "mtp")
    agree(compute(shutil.copytree(GOLDEN / "mtp", tmp_path / "alone"), INPUTS, case), CASES[case])
    elsewhere = shutil.copy(INPUTS, tmp_path)
    agree(compute(tmp_path / "link", Path(elsewhere), case), CASES[case])
    with pytest.raises(UsageError, match=r"no verifier of .*alone; expected it as "):
        compute(tmp_path / "alone", Path(elsewhere), case)


def test_embeddings_are_frozen_whatever_the_folder_says(tmp_path: Path) -> None:
    folder, case = build("eagle3", tmp_path), next(iter(CASES))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"embed_requires_grad": True}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    agree(compute(folder, INPUTS, case), CASES[case])


@pytest.mark.parametrize("family", SETTINGS)
def test_where_nothing_counts_all_is_zero(family: str, tmp_path: Path) -> None:
    inputs = load_file(INPUTS)
    save_file(inputs | {"loss_mask": torch.zeros_like(inputs["loss_mask"])}, tmp_path / "row.safetensors")
    found = compute(GOLDEN / family, tmp_path / "row.safetensors", f"{family}|{{}}")
    expected = next(value for case, value in CASES.items() if case.startswith(f"{family}|"))["grad_norms"]
    assert (found["loss"], found["grad_norms"]) == (0.0, dict.fromkeys(expected, 0.0))


def test_from_the_command_line(tmp_path: Path) -> None:
    out, case = tmp_path / "found.json", next(iter(CASES))
    arguments = [GOLDEN / case.partition("|")[0], "--inputs", INPUTS, "--case", case, "--json", out]
    subprocess.run([sys.executable, GOLDEN / "run.py", *map(str, arguments)], check=True, cwd=tmp_path)
    agree(json.loads(out.read_text(encoding="utf-8")), CASES[case])


def test_what_has_no_golden_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a peagle; golden cases are there for"):
        compute(GOLDEN / "peagle", INPUTS, "peagle|{}")
    with pytest.raises(DataError, match="input_ids, "):
        compute(GOLDEN / "eagle3", GOLDEN / "eagle3" / "model.safetensors", "eagle3|{}")
