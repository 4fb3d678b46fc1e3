"""Requests to servers: tried again where that may help, sent elsewhere where it does not, refused by name."""

import socket
import time
from collections import Counter

import pytest

from speculators.errors import ServerError, UsageError
from speculators.extract.endpoints import Endpoint, Endpoints, RefusedError, RetryPolicy, ServerDownError
from tests.extract.scripted_server import scripted

QUICK = RetryPolicy(retries=3, backoff_seconds=0.01, timeout_seconds=20)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return f"http://127.0.0.1:{port}/v1"


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    answers = iter([(status, {"error": {"message": "busy"}})] * 2 + [(200, {"fine": True})])
    with scripted(lambda _path, _body: next(answers)) as url, Endpoints([url], policy=QUICK) as servers:
        assert servers.ask("POST", "/completions", {}) == {"fine": True}


def test_attempts_end_with_what_the_last_one_said() -> None:
    asked: list[str] = []

    def answer(path: str, _body: object) -> tuple[int, object]:
        asked.append(path)
        return 500, {"error": {"message": f"reason {len(asked)}"}}

    policy = RetryPolicy(retries=2, backoff_seconds=0.01)
    match = r"/completions: HTTP 500: reason 3 \(3 attempts\)"
    with (
        scripted(answer) as url,
        Endpoints([url], policy=policy) as servers,
        pytest.raises(ServerDownError, match=match),
    ):
        servers.ask("POST", "/completions", {})
    assert asked == ["/v1/completions"] * 3


@pytest.mark.parametrize(
    ("status", "body"), [(400, {"error": {"message": "no"}}), (404, {"detail": "no"}), (401, "no")]
)
def test_a_refusal_is_not_tried_again(status: int, body: object) -> None:
    answers = iter([(status, body)])
    with (
        scripted(lambda _path, _body: next(answers)) as url,
        Endpoints([url], policy=QUICK) as servers,
        pytest.raises(RefusedError, match=rf"HTTP {status}: .*no") as caught,
    ):
        servers.ask("POST", "/completions", {})
    assert caught.value.status == status


def test_an_answer_that_is_no_object_is_named() -> None:
    with (
        scripted(lambda _path, _body: (200, [1])) as url,
        Endpoints([url], policy=QUICK) as servers,
        pytest.raises(ServerError, match=r"the answer is \[1\], expected an object"),
    ):
        servers.ask("GET", "/models")


def test_requests_go_round_and_past_a_server_that_is_down() -> None:
    counts: Counter[str] = Counter()

    def answering(name: str):
        def answer(_path: str, _body: object) -> tuple[int, object]:
            counts[name] += 1
            return 200, {"name": name}

        return answer

    with scripted(answering("a")) as one, scripted(answering("b")) as other:
        with Endpoints([one, other], policy=QUICK) as servers:
            for _ in range(6):
                servers.ask("GET", "/models")
        assert counts == {"a": 3, "b": 3}
        with Endpoints([closed_port(), one], policy=QUICK) as servers:
            start = time.monotonic()
            assert [servers.ask("GET", "/models")["name"] for _ in range(30)] == ["a"] * 30
            # Its breaker is open after three failures: most requests never meet it.
            assert servers.endpoints[0].failures <= 5
            assert time.monotonic() - start < 10


def test_the_breaker_opens_at_the_third_failure_and_rests_longer_each_time() -> None:
    endpoint = Endpoint("http://x/v1")
    endpoint.failed()
    endpoint.failed()
    assert endpoint.resting == 0
    endpoint.failed()
    assert 0.5 < endpoint.resting <= 1
    assert endpoint.rest_seconds == 2
    endpoint.failed()  # one that was under way changes nothing
    assert endpoint.rest_seconds == 2
    endpoint.resting_until = 0
    endpoint.failed()
    assert 1.5 < endpoint.resting <= 2
    endpoint.succeeded()
    endpoint.failed()
    assert endpoint.resting == 0


def test_waits_double_up_to_the_longest() -> None:
    policy = RetryPolicy(backoff_seconds=1, max_backoff_seconds=6)
    for attempt, longest in enumerate([1, 2, 4, 6, 6]):
        waits = [policy.wait_seconds(attempt) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest


def test_addresses_and_models() -> None:
    def answer(path: str, _body: object) -> tuple[int, object]:
        return 200, {"data": [{"id": "tiny"}]} if path == "/v1/models" else {"data": []}

    with scripted(answer) as url, Endpoints([url.removesuffix("/v1") + "/"], policy=QUICK) as servers:
        assert servers.model() == "tiny"
    with (
        scripted(lambda _path, _body: (200, {"data": []})) as url,
        Endpoints([url], policy=QUICK) as servers,
        pytest.raises(UsageError, match="names no model; give one"),
    ):
        servers.model()
    with pytest.raises(UsageError, match="no endpoint is given"):
        Endpoints([])
    with pytest.raises(UsageError, match="endpoint 'localhost:8000': expected an address like"):
        Endpoints(["localhost:8000"])
