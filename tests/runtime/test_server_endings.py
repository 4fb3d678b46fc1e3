"""How requests and servers end before their time: clients that leave, engines that fail, signals."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from speculators.errors import EngineError
from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.server import listen, serve
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator
from tests.runtime.serving import samples, serving, wait_for

PROMPTS = ["The quick brown fox jumps over", "Name three cities near a river", "What is the sum of twelve and thirty?"]
LIMITS = EngineLimits(max_num_seqs=4, max_model_len=200)
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_verifier: Path) -> LLM:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    return LLM.from_parts(verifier, random_speculator(verifier, draft_vocab_size=100), limits=LIMITS)


@pytest.fixture(scope="module")
def address(served: LLM) -> Iterator[str]:
    with serving(served, "tiny") as found:
        yield found


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_ends_its_request(address: str, served: LLM, streamed: bool) -> None:
    before = samples(address)["vllm:request_success_total", "abort"]
    body = {"prompt": PROMPTS, "temperature": 0, "n": 8, "ignore_eos": True, "stream": streamed}
    with httpx.Client(timeout=0.5 if not streamed else 60) as client:
        if streamed:
            with client.stream("POST", f"{address}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{address}/v1/completions", json=body)
    wait_for(lambda: not served.engine.has_unfinished)
    wait_for(lambda: samples(address)["vllm:request_success_total", "abort"] > before)


def test_an_engine_failure_reaches_every_client_and_ends_the_server(tiny_verifier: Path) -> None:
    verifier = Verifier.from_pretrained(tiny_verifier, dtype="float32")
    llm = LLM.from_parts(verifier, limits=EngineLimits(max_num_seqs=4, max_model_len=500))

    def break_down(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(3) as pool:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = pool.submit(serve, llm, served_model_names=["tiny"], listener=listener, log_level="critical")
        with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", stream=True, extra_body=IGNORE_EOS)
            assert next(iter(stream)).choices[0].finish_reason is None
            whole = pool.submit(client.completions.create, model="tiny", prompt="y", extra_body=IGNORE_EOS)
            wait_for(lambda: len(llm.engine.running) == 2 or whole.done())
            llm.verifier.model.register_forward_pre_hook(break_down)
            with pytest.raises(openai.APIError, match="the engine failed: RuntimeError: the device is gone"):
                list(stream)
            with pytest.raises(openai.InternalServerError, match="the device is gone"):
                whole.result()
        with pytest.raises(EngineError, match="the engine failed: RuntimeError: the device is gone"):
            server.result()


def test_an_address_that_is_taken_is_named(served: LLM) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(served, port=port)


def test_a_signal_lets_the_requests_under_way_finish(tiny_verifier: Path) -> None:
    """In a process of its own: SIGTERM during a stream; the stream is complete, then the process ends by the signal."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    code = (
        "import sys; from speculators.runtime.llm import LLM; from speculators.runtime.server import serve\n"
        "serve(LLM(sys.argv[1], dtype='float32'), port=int(sys.argv[2]), served_model_names=['tiny'])"
    )
    address = f"http://127.0.0.1:{port}"
    body = {"prompt": "x", "temperature": 0, "ignore_eos": True, "stream": True}
    arguments = [sys.executable, "-c", code, str(tiny_verifier), str(port)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: process.poll() is not None or is_up(address))
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.returncode == -signal.SIGTERM
    assert b"Shutting down" in log


def is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.ConnectError:
        return False
