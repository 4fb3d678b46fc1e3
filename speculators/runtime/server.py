"""An OpenAI-compatible HTTP server around one engine, in which all requests are scheduled together."""

import asyncio
import copy
import importlib.metadata
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from speculators.errors import EngineError, RequestError
from speculators.runtime.engine_thread import EngineRequest, EngineThread, RequestStream
from speculators.runtime.llm import LLM
from speculators.runtime.metrics import LOG_INTERVAL_SECONDS, DraftLog, ServerMetrics
from speculators.runtime.outputs import NO_TOKEN_ALLOWED, RequestOutput
from speculators.runtime.recorder import check_extraction
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.server_answers import (
    Answer,
    ChatAnswer,
    CompletionAnswer,
    ModelCard,
    ModelList,
    error_body,
    failure_body,
)
from speculators.runtime.server_protocol import ChatRequest, CompletionRequest, GenerationRequest

logger = logging.getLogger(__name__)
# What a proxy logs for a client that went away; nobody is left to read it.
CLIENT_CLOSED_REQUEST = 499


class ApiError(Exception):
    """A request that is answered with an error of the OpenAI API's shape."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class EventResponse(StreamingResponse):
    """Server-sent events of a request stream, which is closed when the client has gone or has read all."""

    def __init__(self, events: AsyncIterator[str], stream: RequestStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


class Api:
    """The endpoints over one engine; the engine's thread lives from the application's start to its end."""

    def __init__(self, llm: LLM, names: Sequence[str], on_failure: Callable[[EngineError], None] | None) -> None:
        self._llm, self._names = llm, list(names)
        self._started = int(time.time())
        self._metrics = ServerMetrics(llm.engine, names[0])
        self._thread = EngineThread(llm.engine, watcher=self._metrics, on_failure=on_failure)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Run the engine's thread and the periodic log line."""
        self._thread.start()
        log = asyncio.create_task(self._log_drafts())
        try:
            yield
        finally:
            log.cancel()
            await asyncio.to_thread(self._thread.close)

    async def health(self) -> Response:
        """200 while the engine works, else 503."""
        if self._thread.failure is None:
            return Response()
        return _error(503, str(self._thread.failure), kind="server_error", code="engine_failed")

    async def metrics(self) -> Response:
        """Counters in Prometheus' text format."""
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def version(self) -> dict[str, str]:
        """Version of this package."""
        return {"version": importlib.metadata.version("speculators")}

    async def models(self) -> ModelList:
        """The names this server answers to."""
        return ModelList(object="list", data=[self._card(name) for name in self._names])

    async def model(self, name: str) -> ModelCard:
        """One of the names."""
        return self._card(self._known(name))

    async def complete(self, body: CompletionRequest, http: Request) -> Response:
        """Continue one text or several."""
        answer = CompletionAnswer(self._known(body.model), body)
        return await self._generate(body, [self._llm.prompt_ids(prompt) for prompt in body.prompt], answer, http)

    async def chat(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        answer = ChatAnswer(self._known(body.model), body)
        return await self._generate(body, [(None, self._llm.chat_token_ids(body.conversation()))], answer, http)

    async def _generate(
        self, body: GenerationRequest, prompts: Sequence[tuple[str | None, list[int]]], answer: Answer, http: Request
    ) -> Response:
        params = self._params(body, len(prompts))
        for _, ids in prompts:
            self._check_room(len(ids), params)
        wanted = [(text, ids, choice) for text, ids in prompts for choice in params.choices()]
        stream = await self._thread.submit(
            [EngineRequest(f"{answer.id}-{i}", ids, choice, text) for i, (text, ids, choice) in enumerate(wanted)]
        )
        if body.stream:
            return EventResponse(answer.events(stream), stream)
        outputs = await _finished(stream, http)
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            status = 400 if failed.outputs[0].stop_reason == NO_TOKEN_ALLOWED else 500
            return JSONResponse(failure_body(failed).model_dump(), status)
        return JSONResponse(answer.whole(outputs).model_dump(exclude_unset=True))

    def _params(self, body: GenerationRequest, num_prompts: int) -> SamplingParams:
        try:
            params = body.sampling_params()
            check_extraction(params, extracting=self._llm.extracts, completions=num_prompts * params.n)
        except RequestError as error:
            code = "unsupported_value" if error.parameter is None else "invalid_value"
            raise ApiError(400, str(error), param=error.parameter or "kv_transfer_params", code=code) from error
        return params

    def _check_room(self, prompt_length: int, params: SamplingParams) -> None:
        limit = self._llm.engine.limits.max_model_len
        if params.max_tokens is not None and prompt_length < limit < prompt_length + params.max_tokens:
            raise ApiError(
                400,
                f"max_tokens={params.max_tokens} after a prompt of {prompt_length} tokens passes max_model_len={limit};"
                f" ask for at most {limit - prompt_length}, or leave it out for as many as fit",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _known(self, name: str | None) -> str:
        if name is None:
            return self._names[0]
        if name not in self._names:
            known = ", ".join(self._names)
            raise ApiError(
                404, f"the model {name!r} does not exist here; known: {known}", param="model", code="model_not_found"
            )
        return name

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name, object="model", created=self._started, owned_by="speculators",
            root=self._llm.verifier.name_or_path, max_model_len=self._llm.engine.limits.max_model_len,
        )  # fmt: skip

    async def _log_drafts(self) -> None:
        log = DraftLog(self._metrics, time.monotonic())
        while True:
            await asyncio.sleep(LOG_INTERVAL_SECONDS)
            line = log.line(time.monotonic())
            if line is not None:
                logger.info(line)


async def _finished(stream: RequestStream, http: Request) -> list[RequestOutput] | None:
    """Final outputs in the order of the requests; None when the client goes away first, which ends the requests."""

    async def read() -> dict[str, RequestOutput]:
        newest: dict[str, RequestOutput] = {}
        async for outputs in stream:
            newest.update((output.request_id, output) for output in outputs)
        return newest

    async def wait_for_disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    reader, watcher = asyncio.create_task(read()), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({reader, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            return None
        newest = reader.result()
        return [newest[request.request_id] for request in stream.requests]
    finally:
        reader.cancel()
        watcher.cancel()
        stream.close()


def create_app(
    llm: LLM,
    served_model_names: Sequence[str] | None = None,
    *,
    on_failure: Callable[[EngineError], None] | None = None,
) -> FastAPI:
    """The application, ready for any ASGI server; while it runs, nothing else may use `llm`.

    It answers to `served_model_names` (default: the verifier's name). `on_failure` is called, on the engine's thread,
    when the engine fails; by then every client has been told.
    """
    api = Api(llm, served_model_names or [llm.verifier.name_or_path], on_failure)
    app = FastAPI(title="speculators", version=importlib.metadata.version("speculators"), lifespan=api.lifespan)
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/metrics", api.metrics, methods=["GET"])
    app.add_api_route("/version", api.version, methods=["GET"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/v1/completions", api.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(RequestError, _refuse_request)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(EngineError, _answer_engine_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    # The server's log gets the traceback: this handler only shapes the answer.
    app.add_exception_handler(Exception, _answer_defect)
    return app


def _error(status: int, message: str, *, kind: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, kind=kind, param=param, code=code).model_dump(), status_code=status)


def _refusal(status: int, message: str, param: str | None, code: str | None) -> JSONResponse:
    return _error(status, message, kind="invalid_request_error", param=param, code=code)


async def _refuse_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fault: Mapping[str, Any] = error.errors()[0]
    if fault["type"] == "json_invalid":
        return _refusal(400, f"the body is no JSON: {fault['ctx']['error']}", None, "invalid_json")
    context = fault.get("ctx") or {}
    if isinstance(fault["input"], bytes):
        return _refusal(400, "send the body as content-type: application/json", None, "invalid_json")
    where = [str(step) for step in fault["loc"][1:]]
    if "field" in context and where[-1:] != [context["field"]]:
        where.append(context["field"])
    param = ".".join(where) or None
    got = "" if "field" in context or fault["type"] == "missing" else f" (got {fault['input']!r:.80})"
    message = f"{fault['msg']}{got}" if param is None else f"{param}: {fault['msg']}{got}"
    code = fault["type"] if fault["type"] in ("unknown_parameter", "unsupported_value") else "invalid_value"
    return _refusal(400, message, param, code)


async def _refuse_request(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    param = error.parameter or ("messages" if "chat" in http.url.path else "prompt")
    return _refusal(400, str(error), param, "invalid_value")


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refusal(error.status, str(error), error.param, error.code)


async def _answer_engine_error(_: Request, error: Exception) -> Response:
    return _error(500, str(error), kind="server_error", code="engine_failed")


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(error.status_code, str(error.detail), None, None)


async def _answer_defect(_: Request, error: Exception) -> Response:
    return _error(500, f"internal error: {type(error).__name__}", kind="server_error", code="internal_error")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; EngineError when the address cannot be had. Port 0 takes a free one."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise EngineError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from error


def serve(
    llm: LLM,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_names: Sequence[str] | None = None,
    grace_seconds: int = 30,
    log_level: str = "info",
    listener: socket.socket | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests under way, for at most `grace_seconds`.

    `listener` is a socket to take instead of opening host and port. The signal is raised again once all is ended.
    EngineError when the address cannot be had or the engine fails (every client has been told then).
    """
    failures: list[EngineError] = []

    def stop(failure: EngineError) -> None:
        failures.append(failure)
        server.should_exit = True

    app = create_app(llm, served_model_names, on_failure=stop)
    config = uvicorn.Config(
        app, log_level=log_level, log_config=_log_config(log_level), timeout_graceful_shutdown=grace_seconds
    )
    server = uvicorn.Server(config)
    with listener or listen(host, port) as opened:
        server.run(sockets=[opened])
    if failures:
        raise failures[0]


def _log_config(log_level: str) -> dict[str, Any]:
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["speculators"] = {"handlers": ["default"], "level": log_level.upper(), "propagate": False}
    return config
