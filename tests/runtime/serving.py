"""A real server on a free port of this machine, for as long as a block lasts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from speculators.runtime.llm import LLM
from speculators.runtime.server import create_app, listen

DEADLINE_SECONDS = 120


def wait_for(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; fails after two minutes."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.02)


@contextmanager
def serving(llm: LLM, *names: str) -> Iterator[str]:
    """Base address of a server around `llm`."""
    server = uvicorn.Server(uvicorn.Config(create_app(llm, names or None), log_config=None, access_log=False))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def samples(address: str) -> dict[tuple[str, str], float]:
    """Values of /metrics by name and the label that tells samples of one name apart."""
    found: list[Sample] = []
    for family in text_string_to_metric_families(httpx.get(f"{address}/metrics").text):
        found += [sample for sample in family.samples if not sample.name.endswith("_created")]
    assert all(sample.labels["engine"] == "0" for sample in found)
    return {
        (sample.name, sample.labels.get("position") or sample.labels.get("finished_reason", "")): sample.value
        for sample in found
    }
