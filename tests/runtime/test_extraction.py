"""Hidden states of this runtime: transformers' own, whatever the batch, and no file or lock that nobody asked for."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculators import LLM, KVTransferConfig, SamplingParams
from speculators.errors import EngineError, RequestError, StoreError
from speculators.formats.hidden_states import HiddenStatesWriter, load_hidden_states
from speculators.runtime.engine import Engine
from speculators.runtime.engine_thread import EngineRequest, EngineThread, RequestStream
from speculators.runtime.recorder import HiddenStatesRecorder
from speculators.runtime.verifier import Verifier
from tests.runtime.extraction_table import make_tiny, table
from tests.runtime.serving import serving, wait_for
from tests.tiny_models import SENTENCES

LAYERS = [8, 0, 4]  # told out of order; files keep them ascending


def speculative(layer_ids: Any, **more: Any) -> dict[str, Any]:
    hf_config = {"eagle_aux_hidden_state_layer_ids": layer_ids}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": hf_config},
        **more,
    }


def transfer(folder: Path, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder), **extra},
    }


def extracting(verifier: Path, folder: Path, layers: Any = LAYERS, **keywords: Any) -> LLM:
    folder.mkdir(exist_ok=True)
    keywords.setdefault("kv_transfer_config", transfer(folder))
    return LLM(str(verifier), speculative_config=speculative(layers), dtype="float32", **keywords)


def wanting(max_tokens: int = 1, **params: Any) -> SamplingParams:
    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


@pytest.fixture(scope="module")
def reference(tiny_verifier: Path) -> Any:
    """Transformers alone: ids [T] to states [T, 3, H] of layers 0 and 4, and of what enters the final norm."""
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)

    def states(ids: list[int]) -> Tensor:
        caught: list[Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_hidden_states=True)
        hook.remove()
        return torch.stack([output.hidden_states[0][0], output.hidden_states[4][0], caught[0][0]], 1)

    return states


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_tiny(tmp_path_factory.mktemp("verifiers"))


@pytest.mark.parametrize("name", ["tiny llama", "tiny qwen3", "tiny qwen3-moe"])
def test_states_are_transformers_own(tiny_folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    lines = table(name, tiny_folders[name], tmp_path)
    assert len(lines) == 3 * 7
    assert [line for line in lines if not line.passes] == []
    # One file a request: what is asked twice does not replace what was there.
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4 + 8 + 8 + 8 + 8 + 3 + 3


def test_what_is_generated_stays_the_same(tiny_verifier: Path, tmp_path: Path) -> None:
    plain = LLM(str(tiny_verifier), dtype="float32").generate(SENTENCES[:4], wanting(12), use_tqdm=False)
    llm = extracting(tiny_verifier, tmp_path / "states")
    assert llm.method == "extract_hidden_states"
    assert llm.num_speculative_tokens == 0
    outputs = llm.generate(SENTENCES[:4], wanting(12), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in plain]
    llm.close()


def test_files_say_what_they_hold(tiny_verifier: Path, tmp_path: Path) -> None:
    config = KVTransferConfig(
        "SpeculatorsHiddenStatesConnector",
        "kv_producer",
        {"shared_storage_path": str(tmp_path), "num_writer_threads": 1},
    )
    llm = extracting(tiny_verifier, tmp_path, [4, 1, 4], kv_transfer_config=config)
    path = llm.generate("A city", wanting(), use_tqdm=False)[0].kv_transfer_params["hidden_states_path"]
    assert Path(path).parent == tmp_path
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["hidden_states", "token_ids"]
        assert file.get_slice("hidden_states").get_shape()[1:] == [2, 64]
        assert json.loads(file.metadata()["layer_ids"]) == [1, 4]
    llm.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculative_config": speculative([1], num_speculative_tokens=2)}, "num_speculative_tokens=2, expected 1"),
        ({"speculative_config": speculative([])}, r"layer_ids is \[\], expected layer ids"),
        ({"speculative_config": speculative([1, -1])}, "has -1, expected whole numbers of at least 0"),
        ({"speculative_config": speculative([1, 9])}, "layer_ids has 9, but verifier .* has 8 layers"),
        ({"speculative_config": speculative([1], draft_model_config=None)}, "draft_model_config is None"),
        ({"speculative_config": speculative([1], draft_model_config={"x": 1})}, "expected the key 'hf_config' alone"),
        ({"speculative_config": speculative([1], model="/draft")}, "model='/draft', expected no model"),
        ({"speculative_config": speculative([1], method="mtp")}, "draft_model_config is for method"),
        ({"speculative_config": None}, "belong together"),
        ({"kv_transfer_config": None}, "belong together"),
        ({"kv_transfer_config": {"kv_role": "kv_producer"}}, "kv_connector=None, expected one of"),
        ({"kv_role": "kv_consumer"}, "kv_role is 'kv_consumer', expected 'kv_producer'"),
        ({"kv_connector_extra_config": {"shared_path": "/tmp"}}, "unknown shared_path"),
        ({"kv_rol": "kv_producer"}, "unknown key 'kv_rol'; did you mean kv_role"),
        ({"kv_parallel_size": 2}, "kv_parallel_size=2 cannot be honoured"),
        ({"kv_connector": "NixlConnector"}, "kv_connector='NixlConnector', expected one of"),
    ],
)
def test_what_cannot_be_honoured_is_named(
    tiny_verifier: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    engine = {key: value for key, value in change.items() if key in ("speculative_config", "kv_transfer_config")}
    keywords = {"speculative_config": speculative([1]), "kv_transfer_config": transfer(tmp_path), **engine}
    if not engine:
        keywords["kv_transfer_config"] = {**transfer(tmp_path), **change}
    with pytest.raises(EngineError, match=message):
        LLM(str(tiny_verifier), dtype="float32", **keywords)


def test_a_speculator_is_not_what_states_are_extracted_from(tiny_speculator: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="give the verifier as the model"):
        extracting(tiny_speculator, tmp_path)


def test_requests_that_cannot_be_honoured_are_named(tiny_verifier: Path, tmp_path: Path) -> None:
    for args in ({"kv_transfer_params": 1}, {"other": 1}, ["kv_transfer_params"]):
        with pytest.raises(RequestError, match="extra_args"):
            SamplingParams(extra_args=args)
    with pytest.raises(RequestError, match="unknown key 'path'; known: hidden_states_path, include_output_tokens"):
        wanting(path="x")
    with pytest.raises(RequestError, match="include_output_tokens='yes': expected bool"):
        wanting(include_output_tokens="yes")
    with pytest.raises(RequestError, match="this engine extracts no hidden states"):
        LLM(str(tiny_verifier), dtype="float32").generate("A", wanting(include_output_tokens=True), use_tqdm=False)
    llm = extracting(tiny_verifier, tmp_path / "states")
    with pytest.raises(RequestError, match="2 completions in one request"):
        llm.generate("A", SamplingParams(n=2, temperature=1.0), use_tqdm=False)
    # A refusal of the second prompt takes the first with it.
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([[1, 2], []], wanting(), use_tqdm=False)
    assert not llm.engine.has_unfinished
    llm.close()
    assert list((tmp_path / "states").iterdir()) == []


def test_aborted_requests_leave_nothing(tiny_verifier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    llm = extracting(tiny_verifier, folder, max_num_seqs=2)
    for name in "abc":
        llm.engine.add_request(name, [5, 6, 7], wanting(50))
    llm.engine.step()
    assert len(list(folder.glob("*.lock"))) == 2
    assert list(folder.glob("*.safetensors")) == []
    for name in "cab":
        llm.engine.abort(name)
    assert list(folder.iterdir()) == []
    assert not llm.engine.has_unfinished
    llm.close()


class GatedWriter(HiddenStatesWriter):
    """A disk that takes its time: nothing is written before the gate opens."""

    gate = threading.Event()

    def submit(self, path: Path, *content: Any, **more: Any) -> Any:
        return super().submit(path, *content, ready=self.gate.wait)


@pytest.mark.parametrize("opened", [False, True], ids=["before", "after"])
def test_a_request_aborted_while_its_file_is_written_leaves_nothing(
    tiny_verifier: Path, tmp_path: Path, opened: bool
) -> None:
    GatedWriter.gate.clear()
    recorder = HiddenStatesRecorder(GatedWriter(tmp_path), [1])
    engine = Engine(Verifier.from_pretrained(tiny_verifier, dtype="float32"), recorder=recorder)
    engine.add_request("a", [5, 6, 7], wanting())
    assert engine.step() == []
    assert engine.has_unfinished
    with pytest.raises(RequestError, match="already being served"):
        engine.add_request("a", [5], wanting())
    if opened:
        GatedWriter.gate.set()
        wait_for(lambda: list(tmp_path.glob("*.safetensors")) != [])
    engine.abort("a")
    GatedWriter.gate.set()
    while engine.has_unfinished:
        assert engine.step() == []
    assert list(tmp_path.iterdir()) == []
    recorder.close()


class BreakingVerifier(Verifier):
    """A verifier whose fourth pass fails."""

    passes_left = 3

    def forward(self, *args: Any, **options: Any) -> Any:
        if self.passes_left == 0:
            raise RuntimeError("out of memory")
        self.passes_left -= 1
        return super().forward(*args, **options)


@pytest.mark.parametrize("ending", ["failure", "shutdown"])
def test_an_engine_that_ends_leaves_nothing(tiny_verifier: Path, tmp_path: Path, ending: str) -> None:
    kind = BreakingVerifier if ending == "failure" else Verifier
    recorder = HiddenStatesRecorder(HiddenStatesWriter(tmp_path), [1])
    thread = EngineThread(Engine(kind.from_pretrained(tiny_verifier, dtype="float32"), recorder=recorder))

    async def read(stream: RequestStream) -> None:
        async for _ in stream:
            if ending == "shutdown":
                assert len(list(tmp_path.glob("*.lock"))) == 2
                await asyncio.to_thread(thread.close)

    async def serve() -> None:
        thread.start()
        stream = await thread.submit([EngineRequest(name, [5, 6, 7], wanting(400)) for name in "ab"])
        with pytest.raises(EngineError, match="out of memory" if ending == "failure" else "shutting down"):
            await read(stream)
        if ending == "failure":
            await asyncio.to_thread(thread.close)

    asyncio.run(serve())
    assert list(tmp_path.iterdir()) == []
    recorder.close()


def test_a_file_that_cannot_be_written_is_the_requests_error(tiny_verifier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    llm = extracting(tiny_verifier, folder)
    llm.generate("A", wanting(), use_tqdm=False)
    folder.rename(tmp_path / "away")
    folder.touch()
    with pytest.raises(StoreError, match="hidden states of 2 of 2 requests are lost"):
        llm.generate(["A", "B"], wanting(), use_tqdm=False)
    assert not llm.engine.has_unfinished
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert llm.generate("A", wanting(), use_tqdm=False)[0].error is None
    llm.close()


@pytest.fixture(scope="module")
def address(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("states")
    config = transfer(folder, allow_custom_save_path=True)
    llm = extracting(tiny_verifier, folder, kv_transfer_config=config, max_num_seqs=2)
    with serving(llm, "tiny") as found:
        yield found, folder
    llm.close()


def test_over_http(address: tuple[str, Path], reference: Any) -> None:
    url, folder = address
    ids = [9, 8, 7, 6, 5, 4]
    body = {"model": "tiny", "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    loaded = load_hidden_states(answer["kv_transfer_params"]["hidden_states_path"], timeout=10)
    torch.testing.assert_close(loaded["hidden_states"], reference(ids), atol=1e-5, rtol=0)

    custom = str(folder / "mine.safetensors")
    wishes = {"hidden_states_path": custom, "include_output_tokens": True}
    chat = {"messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 3, "temperature": 0}
    reply = httpx.post(
        f"{url}/v1/chat/completions", json={**chat, "ignore_eos": True, "kv_transfer_params": wishes}, timeout=60
    ).json()
    assert reply["kv_transfer_params"]["hidden_states_path"] == custom
    assert len(load_hidden_states(custom, timeout=10)["token_ids"]) == reply["usage"]["prompt_tokens"] + 2

    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("data: {")]
    assert "hidden_states_path" in events[-1]
    assert all("hidden_states_path" not in event for event in events[:-1])


def test_what_http_refuses(address: tuple[str, Path]) -> None:
    url, _ = address
    for change, message in (
        ({"prompt": [[1], [2]]}, "2 completions"),
        ({"prompt": [1], "n": 2}, "2 completions"),
        ({"prompt": [1], "kv_transfer_params": {"path": "x"}}, "unknown key 'path'"),
        ({"prompt": [1], "kv_transfer_params": {"hidden_states_path": "../x.safetensors"}}, "expected a file below"),
    ):
        refused = httpx.post(f"{url}/v1/completions", json={"max_tokens": 1, **change}, timeout=60)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == ("prompt" if "below" in message else "kv_transfer_params")


def test_a_client_that_goes_away_leaves_neither_file_nor_lock(address: tuple[str, Path]) -> None:
    url, folder = address
    before = sorted(folder.iterdir())
    body = {"prompt": [3, 4, 5], "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
    wait_for(lambda: sorted(folder.iterdir()) == before)
