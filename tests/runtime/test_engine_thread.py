"""The thread around the engine: what clients submit comes back, and an end or a failure reaches every one of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from speculators.errors import EngineError, RequestError
from speculators.runtime.engine import EngineLimits
from speculators.runtime.engine_thread import EngineRequest, EngineThread, RequestStream
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from tests.runtime.parts import random_speculator, random_verifier

LIMITS = EngineLimits(max_num_seqs=3, max_model_len=120)


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return random_verifier(32)


class Record:
    """Keeps what a watcher is told."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.ended: list[str] = []

    def stepped(self, outputs: Sequence[RequestOutput]) -> None:
        self.batches.append(len(outputs))

    def aborted(self, request_ids: Sequence[str]) -> None:
        self.ended += request_ids


@asynccontextmanager
async def running(llm: LLM, record: Record | None = None) -> AsyncIterator[EngineThread]:
    thread = EngineThread(llm.engine, watcher=record)
    thread.start()
    try:
        yield thread
    finally:
        await asyncio.to_thread(thread.close)


def wanted(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))


async def read(stream: RequestStream) -> dict[str, list[int]]:
    """Token ids of every request at its end."""
    last: dict[str, list[int]] = {}
    async for outputs in stream:
        last.update((output.request_id, output.outputs[0].token_ids) for output in outputs)
    return last


def test_requests_of_many_coroutines_share_the_engine(verifier: Verifier) -> None:
    prompts = [[i + 1, 7, 2 * i] for i in range(6)]
    expected = LLM.from_parts(verifier, limits=LIMITS).generate(
        prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False
    )

    async def serve() -> tuple[list[dict[str, list[int]]], Record]:
        record = Record()
        llm = LLM.from_parts(verifier, random_speculator(verifier), limits=LIMITS)
        async with running(llm, record) as thread:
            streams = [await thread.submit([wanted(str(i), prompt, 20)]) for i, prompt in enumerate(prompts)]
            return await asyncio.gather(*[read(stream) for stream in streams]), record

    answers, record = asyncio.run(serve())
    assert answers == [{str(i): output.outputs[0].token_ids} for i, output in enumerate(expected)]
    assert 1 < max(record.batches) <= 3
    assert record.ended == []


def test_states_nobody_read_in_time_are_skipped_but_nothing_is_lost(verifier: Verifier) -> None:
    async def serve() -> tuple[list[int], list[int]]:
        async with running(LLM.from_parts(verifier, limits=LIMITS)) as thread:
            stream = await thread.submit([wanted("slow", [1, 2], 30)])
            lengths, ids = [], []
            async for outputs in stream:
                ids = outputs[0].outputs[0].token_ids
                lengths.append(len(ids))
                await asyncio.sleep(0.05)
            return lengths, ids

    lengths, ids = asyncio.run(serve())
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == len(ids) == 30


def test_a_refused_request_takes_its_group_with_it_and_harms_nobody_else(verifier: Verifier) -> None:
    async def serve() -> tuple[dict[str, list[int]], bool]:
        llm = LLM.from_parts(verifier, limits=LIMITS)
        async with running(llm) as thread:
            good = await thread.submit([wanted("good", [3], 10)])
            with pytest.raises(RequestError, match=r"outside 0\.\.31"):
                await thread.submit([wanted("a", [1], 50), wanted("b", [99], 5)])
            answer = await read(good)
            return answer, llm.engine.has_unfinished

    answer, left = asyncio.run(serve())
    assert list(answer) == ["good"]
    assert len(answer["good"]) == 10
    assert not left


def test_closing_a_stream_ends_its_requests(verifier: Verifier) -> None:
    async def serve() -> Record:
        record = Record()
        llm = LLM.from_parts(verifier, limits=LIMITS)
        async with running(llm, record) as thread:
            stream = await thread.submit([wanted("x", [1], 100), wanted("y", [2], 100)])
            async for _ in stream:
                break
            stream.close()
            stream.close()
            other = await thread.submit([wanted("z", [3], 5)])
            assert len((await read(other))["z"]) == 5
            other.close()
        assert not llm.engine.has_unfinished
        return record

    assert sorted(asyncio.run(serve()).ended) == ["x", "y"]


def test_an_engine_failure_reaches_every_client(verifier: Verifier) -> None:
    async def serve() -> tuple[EngineThread, list[EngineError]]:
        llm = LLM.from_parts(random_verifier(32), limits=LIMITS)
        told: list[EngineError] = []
        thread = EngineThread(llm.engine, on_failure=told.append)
        thread.start()
        streams = [await thread.submit([wanted(name, [ord(name) % 32], 110)]) for name in "abcd"]

        def break_down(*_: object) -> None:
            raise RuntimeError("the device is gone")

        llm.verifier.model.register_forward_pre_hook(break_down)
        for result in await asyncio.gather(*[read(stream) for stream in streams], return_exceptions=True):
            assert isinstance(result, EngineError)
            assert str(result) == "the engine failed: RuntimeError: the device is gone"
            assert isinstance(result.__cause__, RuntimeError)
        with pytest.raises(EngineError, match="the device is gone"):
            await thread.submit([wanted("late", [1], 2)])
        await asyncio.to_thread(thread.close)
        return thread, told

    thread, told = asyncio.run(serve())
    assert isinstance(thread.failure, EngineError)
    assert told == [thread.failure]


def test_closing_the_thread_ends_what_is_left(verifier: Verifier) -> None:
    async def serve() -> None:
        llm = LLM.from_parts(verifier, limits=LIMITS)
        thread = EngineThread(llm.engine)
        thread.start()
        stream = await thread.submit([wanted("a", [1], 110)])
        await asyncio.to_thread(thread.close)
        with pytest.raises(EngineError, match="shutting down"):
            await read(stream)
        with pytest.raises(EngineError, match="takes no more requests"):
            await thread.submit([wanted("b", [1], 2)])
        assert thread.failure is None
        assert not llm.engine.has_unfinished

    asyncio.run(serve())
