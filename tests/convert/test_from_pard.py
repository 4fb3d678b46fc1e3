"""PARD models: kept whole beside a file that says how they draft, and served by that directory alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from speculators import LLM, SamplingParams
from speculators.cli import main
from speculators.convert.options import ConversionVerifier, ConvertOptions
from speculators.convert.run import Conversion, convert
from speculators.errors import EngineError, FormatError, UsageError
from speculators.runtime.config import SpeculativeConfig
from speculators.runtime.infer import infer
from tests.convert.foreign import Drawn, ForeignCheckpoint
from tests.tiny_models import make_tokenizer

WIDTH, VOCAB, INNER, HEADS, KEY_HEADS, SIZE, MASK = 32, 384, 48, 4, 2, 8, 300
PROMPTS = ["The quick brown fox", "Name three cities near", "What is the sum of", "A function takes"]
READERS = ("inspect", "validate")
Change = Callable[[ForeignCheckpoint], None]


def pard(**keys: Any) -> ForeignCheckpoint:
    """A Qwen3 of two layers as its authors publish one: all its own tensors, and a token for those to be drafted."""
    drawn, tensors = Drawn(50), dict[str, Tensor]()
    tensors["model.embed_tokens.weight"] = drawn.matrix(VOCAB, WIDTH) * 4
    tensors["lm_head.weight"] = drawn.matrix(VOCAB, WIDTH) * 2
    tensors["model.norm.weight"] = drawn.norm(WIDTH)
    for index in range(2):
        place = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}.{name}.weight"] = drawn.norm(WIDTH)
        for name in ("q_norm", "k_norm"):
            tensors[f"{place}.self_attn.{name}.weight"] = drawn.norm(SIZE)
        tensors[f"{place}.self_attn.q_proj.weight"] = drawn.matrix(HEADS * SIZE, WIDTH)
        tensors[f"{place}.self_attn.k_proj.weight"] = drawn.matrix(KEY_HEADS * SIZE, WIDTH)
        tensors[f"{place}.self_attn.v_proj.weight"] = drawn.matrix(KEY_HEADS * SIZE, WIDTH)
        tensors[f"{place}.self_attn.o_proj.weight"] = drawn.matrix(WIDTH, HEADS * SIZE)
        tensors[f"{place}.mlp.gate_proj.weight"] = drawn.matrix(INNER, WIDTH)
        tensors[f"{place}.mlp.up_proj.weight"] = drawn.matrix(INNER, WIDTH)
        tensors[f"{place}.mlp.down_proj.weight"] = drawn.matrix(WIDTH, INNER)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": SIZE,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "pard_token": MASK,
        "spd_type": "pard",
        **keys,
    }
    return ForeignCheckpoint("pard", config, tensors)


def with_tokenizer(directory: Path) -> Path:
    make_tokenizer().save_pretrained(directory)
    return directory


def converted(case: ForeignCheckpoint, folder: Path, verifier: Path, **options: Any) -> Conversion:
    source = with_tokenizer(case.write(folder / "foreign"))
    given = ConversionVerifier(str(verifier))
    return convert(source, folder / "ours", verifier=given, options=ConvertOptions(**options))


@pytest.fixture(scope="module")
def directory(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted PARD model."""
    folder = tmp_path_factory.mktemp("pard")
    converted(pard(), folder, tiny_verifier, speculative_tokens=3)
    shutil.rmtree(folder / "foreign")
    return folder / "ours"


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_the_model_is_kept_and_the_file_says_how_it_drafts(directory: Path, tiny_verifier: Path) -> None:
    case = pard()
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == case.tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in case.tensors.items())
    assert json.loads((directory / "config.json").read_text()) == case.config
    assert json.loads((directory / "speculative_config.json").read_text()) == {
        "method": "draft_model",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
        "verifier": {"name_or_path": str(tiny_verifier), "architectures": ["LlamaForCausalLM"]},
    }
    assert AutoTokenizer.from_pretrained(directory).get_vocab() == make_tokenizer().get_vocab()


def test_the_directory_alone_serves_without_loss(directory: Path, tiny_verifier: Path) -> None:
    plain = LLM(str(tiny_verifier), dtype="float32")
    served = LLM(str(directory), dtype="float32")
    assert (served.method, served.num_speculative_tokens) == ("draft_model", 3)
    assert answers(served) == answers(plain)
    assert served.stats is not None
    assert served.stats.num_drafts > 0


def test_what_reads_speculators_says_what_this_is(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Name three cities"}\n', encoding="utf-8")
    for command in (["evaluate", str(directory), "--data", str(rows)], *([n, str(directory)] for n in READERS)):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 1
        told = "".join(capsys.readouterr())
        assert "speculative_config.json makes this a language model that drafts, and no speculator" in told
        assert told.count("F0") == 1


def test_the_first_draft_of_a_copy_of_the_verifier_is_always_accepted(tiny_verifier: Path, tmp_path: Path) -> None:
    source = tmp_path / "foreign"
    shutil.copytree(tiny_verifier, source)
    config = json.loads((source / "config.json").read_text()) | {"pard_token": MASK}
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    given = ConversionVerifier(str(tiny_verifier))
    convert(source, tmp_path / "ours", verifier=given, options=ConvertOptions(speculative_tokens=2))
    served = LLM(str(tmp_path / "ours"), dtype="float32")
    assert answers(served) == answers(LLM(str(tiny_verifier), dtype="float32"))
    assert served.stats is not None
    first, second = served.stats.accepted_per_position
    assert first == served.stats.num_drafts > 0
    # What comes after a mask token is not what comes after the token itself.
    assert second < first


def test_generate_prints_what_the_directory_drafts_for(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(directory), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].text
    with pytest.raises(SystemExit) as ended:
        main(["generate", str(directory), "--prompt", PROMPTS[0], "--max-tokens", "8", "--dtype", "float32"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == expected + "\n"


def test_keys_of_the_user_win_but_for_method_and_model(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"num_speculative_tokens": 2, "parallel_drafting": False, "method": "eagle3", "model": "other"}
    plan = infer(str(directory), SpeculativeConfig.from_dict(asked))
    assert plan.config is not None
    assert (plan.config.method, plan.config.model) == ("draft_model", str(directory))
    assert (plan.num_speculative_tokens, plan.config.parallel_drafting) == (2, False)
    assert "method='eagle3' is reset to 'draft_model'" in caplog.text
    assert "model='other' is reset to" in caplog.text


def test_as_a_draft_of_another_verifier_it_drafts_as_its_file_says(directory: Path) -> None:
    plan = infer("org/verifier", SpeculativeConfig.from_dict({"model": str(directory)}))
    assert plan.verifier == "org/verifier"
    assert plan.config is not None
    assert (plan.method, plan.num_speculative_tokens, plan.config.parallel_drafting) == ("draft_model", 3, True)


def test_extraction_from_such_a_directory_is_refused(directory: Path) -> None:
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    keys = {"method": "extract_hidden_states", "draft_model_config": layers}
    with pytest.raises(EngineError, match="give the verifier as the model"):
        infer(str(directory), SpeculativeConfig.from_dict(keys))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"method": "eagle3"}, "method is"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"temperature": 1.0}, "temperature is not a known key"),
        ({"verifier": None}, "verifier"),
    ],
)
def test_a_file_that_says_something_else_is_refused(
    content: dict[str, Any], text: str, directory: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    file = copy / "speculative_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | content), encoding="utf-8")
    with pytest.raises(FormatError, match=text):
        infer(str(copy), None)


def test_a_tied_model_is_kept_without_a_second_copy_of_its_embeddings(tiny_verifier: Path, tmp_path: Path) -> None:
    case = pard(tie_word_embeddings=True)
    case.tensors["lm_head.weight"] = case.tensors["model.embed_tokens.weight"].clone()
    plan = converted(case, tmp_path, tiny_verifier).plan
    assert plan.dropped == {"lm_head.weight": "tied: equal to the embeddings, which are kept"}
    assert any("taken as 12" in note for note in plan.notes)


def test_the_mask_token_may_be_given(tiny_verifier: Path, tmp_path: Path) -> None:
    case = pard()
    del case.config["pard_token"]
    converted(case, tmp_path, tiny_verifier, mask_token_id=17)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["pard_token"] == 17


def change(key: str, value: object) -> Change:
    return lambda case: case.config.update({key: value})


REFUSED: dict[str, tuple[Change, str]] = {
    "more layers than tensors": (lambda case: case.config.update(num_hidden_layers=10**15), "the weights have 25"),
    "no sizes": (lambda case: case.config.update(hidden_size="wide"), "describes no model that can be built"),
    "sizes beyond all": (lambda case: case.config.update(hidden_size=2**62), "describes no model that can be built"),
    "PARD-2": (change("spd_type", "pard2"), "PARD-2 draft adds a projection of the verifier's hidden states"),
    "its flag": (change("pard2", True), "PARD-2 draft"),
    "its tensor": (lambda case: case.tensors.update({"target_proj.weight": torch.ones(32, 256)}), "PARD-2 draft"),
    "quantised": (change("quantization_config", {"quant_method": "fp8"}), "is quantised"),
    "no mask token": (lambda case: case.config.pop("pard_token"), "no pard_token is written"),
    "mask token beyond": (change("pard_token", 384), "expected a token id below vocab_size, 384"),
    "two mask tokens": (change("ptd_token_id", 4), "these mask tokens differ"),
    "unknown model": (change("model_type", "qwen99"), "model_type is 'qwen99'"),
    "missing tensor": (lambda case: case.tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
    "extra tensor": (lambda case: case.tensors.update({"model.extra": torch.ones(2)}), "model.extra"),
    "misshapen": (lambda case: case.tensors.update({"model.norm.weight": torch.ones(31)}), r"has shape \[31\]"),
    "whole numbers": (lambda case: case.tensors.update({"model.norm.weight": torch.ones(32).int()}), "stored as I32"),
    "untied head": (change("tie_word_embeddings", True), "lm_head.weight differs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_named(name: str, tiny_verifier: Path, tmp_path: Path) -> None:
    changed, text = REFUSED[name]
    case = pard()
    changed(case)
    with pytest.raises(FormatError, match=text):
        converted(case, tmp_path, tiny_verifier)
    assert not (tmp_path / "ours").exists()


def test_another_tokenizer_is_refused_before_anything_is_written(tiny_verifier: Path, tmp_path: Path) -> None:
    source = pard().write(tmp_path / "foreign")
    tokenizer = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    with_tokenizer(source)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(EngineError, match="tok"):
        convert(source, tmp_path / "ours", verifier=ConversionVerifier(str(tiny_verifier)))
    assert not (tmp_path / "ours").exists()


def test_an_option_that_means_nothing_is_refused(tiny_verifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="block_size cannot be given for a PARD draft"):
        converted(pard(), tmp_path, tiny_verifier, block_size=4)
