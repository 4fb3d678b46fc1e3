"""Answers from servers: the same as in process, each once, whatever the servers do meanwhile."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from speculators.errors import DataError, UsageError
from speculators.extract.endpoints import RefusedError, RetryPolicy, ServerDownError
from speculators.extract.regenerate import RegenerateOptions, regenerate_rows
from speculators.extract.regenerate_remote import EndpointOptions, regenerate_remotely
from speculators.runtime.engine import Engine, EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.verifier import Verifier
from tests.runtime.serving import serving

LIMITS = EngineLimits(max_num_seqs=3, max_model_len=256)
MIXED = RegenerateOptions(
    max_new_tokens=9, temperatures=((0.0, 1.0), (1.0, 1.0)), seed=3, sampling={"top_p": 0.9, "top_k": 20}
)
QUICK = RetryPolicy(retries=2, backoff_seconds=0.01)


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path) -> Verifier:
    return Verifier.from_pretrained(tiny_verifier, dtype="float32")


@pytest.fixture(scope="module")
def address(verifier: Verifier) -> Iterator[str]:
    with serving(LLM.from_parts(verifier, limits=LIMITS), "tiny") as found:
        yield found


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [{"prompt": f"Name {i} cities near a river.", "id": f"p{i}"} for i in range(6)]
    rows[2] = {"turns": ["Name three cities.", "Which is the oldest?"], "system": "Be brief.", "id": "p2"}
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def answering(reply: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]) -> Iterator[tuple[str, list[dict]]]:
    """A server of another make: its address, and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, payload: dict[str, Any]) -> None:
            data = json.dumps(payload).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "org/model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            self._send(*reply(body))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fox(**message: object) -> tuple[int, dict[str, Any]]:
    choice = {"message": {"role": "assistant", "content": "A fox.", **message}, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"completion_tokens": 3}}


def test_a_server_of_this_runtime_answers_as_the_run_in_process(
    tmp_path: Path, verifier: Verifier, address: str, prompts: Path
) -> None:
    local = tmp_path / "local.jsonl"
    here = regenerate_rows(Engine(verifier, limits=LIMITS), prompts, local, MIXED, progress=False)
    # Two addresses of one server stand for two servers.
    servers = EndpointOptions((address, f"{address}/v1"), concurrency=4, policy=QUICK)
    out = tmp_path / "remote.jsonl"
    result = regenerate_remotely(servers, prompts, out, MIXED, progress=False)
    assert read(out) == read(local)
    assert (result.rows, result.failed, result.skipped) == (6, [], [])
    # The server counts a token that ends an answer, as the engine does.
    assert result.answer_tokens == here.answer_tokens
    assert not (tmp_path / "remote.errors.jsonl").exists()
    again = regenerate_remotely(servers, prompts, out, MIXED, progress=False)
    assert (again.rows, again.resumed) == (0, 6)


def test_rows_that_a_server_refuses_are_named_and_asked_again(tmp_path: Path, address: str, prompts: Path) -> None:
    with prompts.open("a") as stream:
        stream.write(json.dumps({"prompt": "long " * 300, "id": "long"}) + "\n")
    out = tmp_path / "out.jsonl"
    servers = EndpointOptions((address,), policy=QUICK)
    short = RegenerateOptions(max_new_tokens=3)
    for resumed in (0, 6):
        result = regenerate_remotely(servers, prompts, out, short, progress=False)
        assert (result.failed, result.resumed, len(read(out))) == (["long"], resumed, 6)
        [fault] = read(tmp_path / "out.errors.jsonl")
        assert fault["id"] == "long"
        assert fault["where"] == f"{prompts}:7"
        assert "HTTP 400" in fault["error"]
    lines = prompts.read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[:-1]))
    regenerate_remotely(servers, prompts, out, short, progress=False)
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_row_26_what_is_asked_for_stands_at_the_top_of_the_request(tmp_path: Path, prompts: Path) -> None:
    """A plain HTTP body has no `extra_body` that anybody would unwrap (pitfall 26)."""
    options = RegenerateOptions(
        max_new_tokens=7,
        temperatures=((0.5, 1.0),),
        sampling={"top_p": 0.9, "min_p": 0.1},
        template_options={"enable_thinking": False},
        limit=3,
    )
    with answering(lambda _: fox(reasoning_content="I look.")) as (address, bodies):
        out = tmp_path / "out.jsonl"
        result = regenerate_remotely(EndpointOptions((address,)), prompts, out, options, progress=False)
    assert result.rows == 3
    assert len(bodies) == 4
    by_text = {body["messages"][-1]["content"]: body for body in bodies}
    second = by_text["Which is the oldest?"]
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    wanted = {"model": "org/model", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "min_p": 0.1}
    assert wanted.items() <= second.items()
    assert "extra_body" not in second
    assert second["seed"] == by_text["Name three cities."]["seed"] + 1
    # History holds the answer without its reasoning, which the written row keeps.
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2] == {"role": "assistant", "content": "A fox."}
    answers = [message for message in read(out)[2]["messages"] if message["role"] == "assistant"]
    assert answers == [{"role": "assistant", "content": "A fox.", "reasoning_content": "I look."}] * 2


def test_busy_servers_are_asked_again(tmp_path: Path, prompts: Path) -> None:
    asked: dict[str, int] = {}

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        key = json.dumps(body["messages"])
        asked[key] = asked.get(key, 0) + 1
        return fox() if asked[key] == 3 else (503 if asked[key] == 2 else 429, {"error": {"message": "busy"}})

    with answering(reply) as (address, _):
        servers = EndpointOptions((address,), concurrency=1, policy=RetryPolicy(retries=2, backoff_seconds=0.001))
        options = RegenerateOptions(limit=2)
        result = regenerate_remotely(servers, prompts, tmp_path / "out.jsonl", options, progress=False)
    assert (result.rows, result.failed) == (2, [])
    assert set(asked.values()) == {3}


def test_one_row_that_breaks_the_server_does_not_end_the_run(tmp_path: Path, prompts: Path) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (500, {"detail": "boom"}) if "Name 1 " in body["messages"][-1]["content"] else fox()

    with answering(reply) as (address, _):
        servers = EndpointOptions((address,), concurrency=2, policy=RetryPolicy(retries=1, backoff_seconds=0.001))
        result = regenerate_remotely(servers, prompts, tmp_path / "out.jsonl", progress=False)
    assert (result.rows, result.failed) == (5, ["p1"])
    assert "HTTP 500" in read(tmp_path / "out.errors.jsonl")[0]["error"]


def test_a_server_that_dies_ends_the_run_and_keeps_what_is_finished(tmp_path: Path, prompts: Path) -> None:
    answers = 0

    def reply(_: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        nonlocal answers
        answers += 1
        return fox() if answers <= 2 else (500, {})

    out = tmp_path / "out.jsonl"
    with answering(reply) as (address, _):
        servers = EndpointOptions((address,), concurrency=1, policy=RetryPolicy(retries=0))
        with pytest.raises(ServerDownError, match="HTTP 500"):
            regenerate_remotely(servers, [prompts, _more(tmp_path)], out, progress=False)
    assert [row["id"] for row in read(out)] == ["p0", "p1"]
    assert len(read(tmp_path / "out.errors.jsonl")) == 3
    with answering(lambda _: fox()) as (address, _):
        result = regenerate_remotely(EndpointOptions((address,)), [prompts, _more(tmp_path)], out, progress=False)
    assert (result.resumed, result.rows) == (2, 14)
    assert [row["id"] for row in read(out)] == [*(f"p{i}" for i in range(6)), *(f"m{i}" for i in range(10))]


def _more(folder: Path) -> Path:
    path = folder / "more.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "id": f"m{i}"}) + "\n" for i in range(10)))
    return path


def test_nobody_there_is_an_error(tmp_path: Path, prompts: Path) -> None:
    with answering(lambda _: fox()) as (address, _):
        pass
    servers = EndpointOptions((address,), policy=RetryPolicy(retries=1, backoff_seconds=0.01))
    with pytest.raises(ServerDownError, match=r"/v1/models: .*\(2 attempts\)"):
        regenerate_remotely(servers, prompts, tmp_path / "out.jsonl", progress=False)
    with pytest.raises(UsageError, match="endpoint 'localhost:8000'"):
        regenerate_remotely(EndpointOptions(("localhost:8000",)), prompts, tmp_path / "out.jsonl", progress=False)
    with pytest.raises(UsageError, match="concurrency is 0"):
        EndpointOptions((address,), concurrency=0)


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_refuses_everybody_ends_the_run_at_once(tmp_path: Path, prompts: Path, status: int) -> None:
    with answering(lambda _: (status, {"error": {"message": "no"}})) as (address, bodies):
        servers = EndpointOptions((address,), concurrency=1, policy=QUICK)
        with pytest.raises(RefusedError, match=f"HTTP {status}: no"):
            regenerate_remotely(servers, prompts, tmp_path / "out.jsonl", progress=False)
    assert len(bodies) <= 2


def test_answers_that_are_none_are_named(tmp_path: Path, prompts: Path) -> None:
    replies = iter([(200, {"choices": []}), fox(tool_calls=[{"function": {"name": "f"}}]), fox()])
    with answering(lambda _: next(replies)) as (address, _):
        servers = EndpointOptions((address,), concurrency=1, policy=QUICK)
        options = RegenerateOptions(limit=2)
        result = regenerate_remotely(servers, prompts, tmp_path / "out.jsonl", options, progress=False)
        assert result.failed == ["p0", "p1"]
        reasons = [fault["error"] for fault in read(tmp_path / "out.errors.jsonl")]
        assert "holds no message" in reasons[0]
        assert "tool call" in reasons[1]
        keep = RegenerateOptions(limit=1, store_token_ids=True)
        with pytest.raises(DataError, match="gives no token_ids"):
            regenerate_remotely(servers, prompts, tmp_path / "ids.jsonl", keep, progress=False)
