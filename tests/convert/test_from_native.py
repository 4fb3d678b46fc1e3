"""Medusa heads, MLP speculators and native MTP blocks, converted: the logits of a reference from foreign tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.draft_model import DraftContext
from speculators.models.speculator import Speculator
from tests.convert import layouts_native as layouts
from tests.convert import reference_native as reference
from tests.convert.converting import converted
from tests.convert.foreign import ForeignCheckpoint

Make = Callable[[], ForeignCheckpoint]
TOKENS = 9


def drafted(directory: Path, verifier: Path, tokens_T: Tensor, states_TH: Tensor, steps: int) -> list[Tensor]:
    """Each step's logits over the verifier's ids behind `tokens_T`, of which each stands behind its state."""
    speculator = Speculator.from_pretrained(directory, dtype=torch.float32)
    draft, found = speculator.attach_verifier(load_verifier_weights(verifier)).draft, []
    ids = draft.verifier_ids_D

    def likeliest(logits: Tensor, step: int) -> tuple[Tensor, None]:
        spread = torch.full((speculator.config.verifier_vocab_size,), -torch.inf)
        found.append(logits[0] if ids is None else spread.scatter(0, ids, logits[0]))
        return logits.argmax(-1), None

    context = DraftContext(
        token_ids_BT=tokens_T[None],
        aux_hidden_states_BTX=None,
        starts=[0],
        lengths=[len(tokens_T)],
        cache=draft.make_cache(1),
        rows=slice(0, 1),
        normed_hidden_states_BTH=states_TH[None],
    )
    draft.propose(context, steps, likeliest)
    return found


def spoken(width: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens [T] and states after a final norm [T, H]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(vocab, (TOKENS,), generator=generator), torch.randn(TOKENS, width, generator=generator)


def agree(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected) > 1
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", layouts.MEDUSA_CASES, ids=lambda make: make.__name__)
def test_medusa_heads_compute_what_their_files_say(make: Make, tiny_verifier: Path, tmp_path: Path) -> None:
    """Heads of both kinds of layouts, with output matrices of their own and shared ones (pitfall 36)."""
    case, (tokens_T, states_TH) = make(), spoken(layouts.WIDTH, layouts.VOCAB)
    converted(case, tmp_path, tiny_verifier)
    expected = reference.medusa(case, states_TH[-1], load_verifier_weights(tiny_verifier).lm_head)
    assert len(expected) == layouts.HEADS
    agree(drafted(tmp_path / "ours", tiny_verifier, tokens_T, states_TH, layouts.HEADS), expected)


@pytest.mark.parametrize("make", layouts.MLP_CASES, ids=lambda make: make.__name__)
def test_mlp_speculators_compute_what_their_files_say(make: Make, tiny_verifier: Path, tmp_path: Path) -> None:
    case, (tokens_T, states_TH) = make(), spoken(layouts.WIDTH, layouts.VOCAB)
    converted(case, tmp_path, tiny_verifier)
    steps = case.config["n_predict"]
    expected = reference.accelerator(case, states_TH[-1], int(tokens_T[-1]), steps)
    agree(drafted(tmp_path / "ours", tiny_verifier, tokens_T, states_TH, steps), expected)


@pytest.mark.parametrize("style", layouts.MTP_CASES)
def test_native_blocks_compute_what_their_files_say(style: str, tmp_path: Path) -> None:
    """The block is one of full attention, and every native tensor is mapped (pitfall 37)."""
    case = layouts.MTP_CASES[style]()
    verifier = tmp_path / "foreign"
    tokens_T, states_TH = spoken(case.config["hidden_size"], case.config["vocab_size"])
    converted(case, tmp_path, verifier)
    expected = reference.NativeBlock(case).logits(tokens_T, states_TH, 3)
    agree(drafted(tmp_path / "ours", verifier, tokens_T, states_TH, 3), expected)


@pytest.mark.parametrize("make", [*layouts.MEDUSA_CASES, *layouts.MLP_CASES], ids=lambda make: make.__name__)
def test_every_tensor_of_a_head_is_accounted_for(make: Make, tiny_verifier: Path, tmp_path: Path) -> None:
    case = make()
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert sorted([*plan.used, *plan.dropped]) == sorted(case.tensors)


@pytest.mark.parametrize("style", layouts.MTP_CASES)
def test_every_tensor_of_a_verifier_is_accounted_for(style: str, tmp_path: Path) -> None:
    case = layouts.MTP_CASES[style]()
    plan = converted(case, tmp_path, tmp_path / "foreign").plan
    assert sorted([*plan.used, *plan.dropped]) == sorted(case.tensors)
    assert plan.dropped["model.norm.weight"] == "a weight of the verifier's own, which a speculator does not repeat"


def test_what_a_medusa_file_says_wrongly_is_said(tiny_verifier: Path, tmp_path: Path) -> None:
    """The tensors count the heads; the verifier is the one that was given; the dtype is the file's."""
    conversion = converted(layouts.medusa(), tmp_path, tiny_verifier)
    assert conversion.plan.notes == (
        "the configuration says 2 heads; there are 3, and all are kept",
        f"the configuration names the verifier 'lmsys/vicuna-7b-v1.3'; {str(tiny_verifier)!r} is written",
    )
    speculator = Speculator.from_pretrained(tmp_path / "ours")
    assert speculator.config.num_speculative_tokens == layouts.HEADS
    assert speculator.config.dtype == "float16"


def test_a_shared_output_matrix_is_stored_once(tiny_verifier: Path, tmp_path: Path) -> None:
    converted(layouts.modelopt_medusa(), tmp_path, tiny_verifier)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert [name for name, tensor in written.items() if tensor.shape[0] == layouts.VOCAB] == ["lm_head.weight"]


def test_a_head_that_is_left_to_the_verifier_is_derived_from_it(tiny_verifier: Path, tmp_path: Path) -> None:
    plan = converted(layouts.modelopt_parallel_heads(), tmp_path, tiny_verifier).plan
    assert plan.derived == {"lm_head.weight": f"the output head of {tiny_verifier}, which the heads share"}


def test_copies_of_tied_weights_are_dropped_with_the_reason(tiny_verifier: Path, tmp_path: Path) -> None:
    whole = converted(layouts.accelerator_tied(), tmp_path / "all", tiny_verifier)
    once = converted(layouts.accelerator_tied_once(), tmp_path / "once", tiny_verifier)
    assert whole.plan.dropped["speculator.emb.2.weight"] == "the same as emb.0.weight, with which it is tied"
    assert len(whole.plan.dropped) == 9
    assert not once.plan.dropped
    files = [conversion.directory / "model.safetensors" for conversion in (whole, once)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_repeated_embeddings_are_dropped_with_the_reason(tmp_path: Path) -> None:
    plan = converted(layouts.MTP_CASES["glm"](), tmp_path, tmp_path / "foreign").plan
    reason = "the same as the verifier's {}, which the draft shares"
    assert plan.dropped["model.layers.4.embed_tokens.weight"] == reason.format("embed_tokens")
    assert plan.dropped["model.layers.4.shared_head.head.weight"] == reason.format("lm_head")


def test_a_routers_offsets_stay_float32_beside_half_precision(tmp_path: Path) -> None:
    case = layouts.MTP_CASES["glm"]()
    case.options["dtype"] = "bfloat16"
    converted(case, tmp_path, tmp_path / "foreign")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    found = {name: tensor.dtype for name, tensor in written.items() if tensor.dtype is not torch.bfloat16}
    assert found == {"mtp_layers.0.mlp.gate.e_score_correction_bias": torch.float32}


def test_float8_weights_say_what_they_were_made_of(tmp_path: Path) -> None:
    plan = converted(layouts.native_mtp_float8(), tmp_path, tmp_path / "foreign").plan
    weight = "model.layers.4.self_attn.o_proj.weight"
    assert plan.derived[weight] == f"its F8_E4M3 numbers times {weight}_scale_inv, in float32"
    assert plan.dropped[f"{weight}_scale_inv"] == f"multiplied into {weight}"
