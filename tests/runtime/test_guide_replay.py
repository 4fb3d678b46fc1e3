"""Every example of the guides that is not refused runs: tiny models in place of the paths, nothing else changed."""

import json
from typing import Any

import pytest

from speculators import LLM, SamplingParams
from speculators.cli import main
from speculators.runtime.config_rules import EXTRACT_METHOD
from speculators.runtime.step_costs import CONTEXT_VARIABLE
from tests.runtime.guide_examples import DRAFT, EXAMPLES, Example
from tests.runtime.methods import REPEATING
from tests.runtime.served import DEEP, NATIVE, Directories

PROMPT, LENGTH = "w3 w4 w5 w3 w4", 8
REPLAYED = [(name, one) for name, one in EXAMPLES if one.refused is None]


def kind_of(example: Example) -> str:
    config = example.speculative_config or {}
    if config.get("method") == "mtp" and "model" not in config:
        return NATIVE
    return DEEP if example.extracts_to else "dense"


def drafting(example: Example, made: Directories) -> dict[str, Any] | None:
    """What the example says, with our paths."""
    config = dict(example.speculative_config or {})
    method = config.get("method")
    if method == "custom_class":
        config["model"] = REPEATING
    elif config.get("model") == DRAFT and method == "draft_model":
        style = "parallel" if config.get("parallel_drafting") else "near"
        config["model"] = made.draft_model("another vocabulary" if config.get("use_heterogeneous_vocab") else style)
    elif config.get("model") == DRAFT:
        config["model"] = made.speculator(str(method))
    return config or None


def model_of(example: Example, made: Directories) -> str:
    """A verifier; a speculator where the guide says nothing of what drafts."""
    config = example.speculative_config or {}
    return made.verifier(kind_of(example)) if "method" in config else made.speculator("eagle3")


def connector(made: Directories) -> dict[str, Any]:
    extra = {"shared_storage_path": str(made.root / "states")}
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


PLAIN: dict[str, str] = {}


def plain(kind: str, made: Directories) -> str:
    if kind not in PLAIN:
        params = SamplingParams(temperature=0, max_tokens=LENGTH)
        PLAIN[kind] = LLM(made.verifier(kind)).generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    return PLAIN[kind]


def is_synthetic(example: Example) -> bool:
    return (example.speculative_config or {}).get("rejection_sample_method") == "synthetic"


@pytest.mark.parametrize("example", [pytest.param(one, id=name) for name, one in REPLAYED if not one.serve])
def test_an_example_of_llm_answers_as_without_speculation(
    example: Example, made: Directories, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CONTEXT_VARIABLE, "32")
    keywords: dict[str, Any] = dict(example.engine)
    if example.extracts_to:
        keywords["kv_transfer_config"] = connector(made)
    llm = LLM(
        model_of(example, made),
        speculative_config=drafting(example, made),
        additional_config=example.additional_config,
        **keywords,
    )
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    llm.close()
    if is_synthetic(example):
        assert "outputs are meaningless" in caplog.text
    else:
        assert output.outputs[0].text == plain(kind_of(example), made)
    config = example.speculative_config or {}
    assert llm.method == config.get("method", "eagle3")
    if llm.method == EXTRACT_METHOD:
        assert output.kv_transfer_params is not None
    else:
        assert llm.stats is not None
        assert llm.num_speculative_tokens == config.get("num_speculative_tokens", 7 if "method" in config else 3)
    if example.additional_config and "rejection_sampler_config" in example.additional_config:
        assert "lossy" in caplog.text


@pytest.mark.parametrize("example", [pytest.param(one, id=name) for name, one in REPLAYED if one.serve])
def test_an_example_of_the_command_line_answers_as_without_speculation(
    example: Example, made: Directories, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate` reads the options of `serve` and says one answer."""
    monkeypatch.setenv(CONTEXT_VARIABLE, "32")
    words = ["generate", model_of(example, made), "--prompt", PROMPT, "--max-tokens", str(LENGTH)]
    config = drafting(example, made)
    if config is not None:
        words += ["--speculative-config", json.dumps(config)]
    if example.additional_config is not None:
        words += ["--additional-config", json.dumps(example.additional_config)]
    if example.extracts_to:
        words += ["--kv-transfer-config", json.dumps(connector(made))]
    for name, value in example.engine.items():
        words.append(f"--{name.replace('_', '-')}={json.dumps(value)}")
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr()
    assert ended.value.code == 0, told.err
    if not is_synthetic(example):
        assert told.out == plain(kind_of(example), made) + "\n"


def test_examples_of_every_method_are_replayed() -> None:
    shown = {(one.speculative_config or {}).get("method") for _, one in REPLAYED}
    # The guides name `medusa` and `ngram_gpu` and show neither.
    assert shown - {None} == {
        *("ngram", "suffix", "eagle", "eagle3", "mtp", "dflash", "dspark", "draft_model", "mlp_speculator"),
        *("custom_class", "extract_hidden_states"),
    }
