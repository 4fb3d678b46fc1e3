"""The source that runs vLLM, as far as that goes without vLLM; `make test-extract-vllm` goes further."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speculators.errors import ServerError, UsageError
from speculators.extract.filling import RowFault
from speculators.extract.run import extract
from speculators.extract.vllm_engine import VllmOptions, VllmSource
from tests.extract.rows import AUX, EXACT, prepare_rows


def ignore(rows: int, tokens: int) -> None:
    """Nobody watches."""


def test_chunked_prefill_is_off_unless_asked_and_there_is_headroom() -> None:
    keywords = VllmOptions().engine_keywords("V", (0, 3, 6), 300, "/states")
    assert keywords["enable_chunked_prefill"] is False
    assert keywords["max_model_len"] == 302
    assert keywords["max_num_batched_tokens"] >= keywords["max_model_len"]
    assert keywords["kv_transfer_config"] == {
        "kv_connector": "SpeculatorsHiddenStatesConnector",
        "kv_connector_module_path": "speculators.extract.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/states"},
    }
    assert keywords["speculative_config"] == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}},
    }
    asked = VllmOptions(chunked_prefill=True, max_model_len=100, keywords={"max_num_batched_tokens": 64})
    keywords = asked.engine_keywords("V", (0,), 300, "/states")
    assert (keywords["enable_chunked_prefill"], keywords["max_model_len"]) == (True, 100)
    assert keywords["max_num_batched_tokens"] == 64


def test_keywords_that_extraction_chooses_are_refused() -> None:
    with pytest.raises(UsageError, match="enable_chunked_prefill, model cannot be given"):
        VllmOptions(keywords={"model": "x", "enable_chunked_prefill": True})


def test_rows_without_headroom_are_faults_and_start_no_engine(tmp_path) -> None:
    options = VllmOptions(python=tmp_path / "none", max_model_len=10, folder=tmp_path)
    with VllmSource("V", (0,), 50, options) as source:
        found = source.states([torch.arange(9), torch.arange(50)], ignore)
    assert found == [
        RowFault("9 tokens; max_model_len 10 has room for 8"),
        RowFault("50 tokens; max_model_len 10 has room for 8"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_vllm_says_so(tmp_path) -> None:
    for python, message in [
        (Path(sys.executable), "ended with code 1; it said:(.|\n)*No module named 'vllm'"),
        (tmp_path / "none", "cannot be started with .*No such file"),
    ]:
        options = VllmOptions(python=python, folder=tmp_path)
        with VllmSource("V", (0,), 8, options) as source, pytest.raises(ServerError, match=message):
            source.states([torch.arange(4)], ignore)
    assert list(tmp_path.iterdir()) == []


def test_the_cause_is_told_however_much_follows_it(tmp_path) -> None:
    """vLLM's processes die one of the other, and the first says why."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '(worker) ValueError: too little memory'\nseq 100\nexit 3\n")
    python.chmod(0o755)
    options = VllmOptions(python=python, folder=tmp_path)
    with VllmSource("V", (0,), 8, options) as source, pytest.raises(ServerError) as told:
        source.states([torch.arange(4)], ignore)
    said = str(told.value).splitlines()
    assert said[:2] == ["vLLM ended with code 3; it said:", "(worker) ValueError: too little memory"]
    assert said[-1] == "100"
    assert len(said) < 20


def test_extraction_with_vllm_asks_the_python_it_is_told(tiny_verifier, tmp_path) -> None:
    prepared = prepare_rows(tiny_verifier, tmp_path, count=2)
    options = replace(EXACT, source="vllm", vllm=VllmOptions(python=tmp_path / "no-such-python"))
    with pytest.raises(ServerError, match=r"0 rows done.* run it again.*cannot be started with .*no-such-python"):
        extract(tiny_verifier, prepared.directory, tmp_path / "store", AUX, options, progress=False)
