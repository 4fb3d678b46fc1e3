"""Generation in process: `LLM`, with the names and the meaning that vLLM users know."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from speculators.errors import EngineError, RequestError, StoreError
from speculators.formats.hidden_states import HiddenStatesOptions, HiddenStatesWriter, parse_transfer_config
from speculators.formats.hidden_states_options import LAYER_IDS
from speculators.models.speculator import Speculator
from speculators.runtime.additional import AdditionalConfig
from speculators.runtime.assemble import choose_depth, choose_engine, choose_rule
from speculators.runtime.config import METHOD_OF_FAMILY, SpeculativeConfig
from speculators.runtime.config_rules import EXTRACT_METHOD
from speculators.runtime.description import LanguageModel, ModelDescription
from speculators.runtime.engine import EngineLimits
from speculators.runtime.engine_keywords import check_engine_keywords
from speculators.runtime.infer import Plan, add, infer
from speculators.runtime.methods import Build, prepare
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.prefixes import require_prefix_caching
from speculators.runtime.recorder import HiddenStatesRecorder, check_extraction
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.stats import SpecDecodeStats
from speculators.runtime.transfer import KVTransferConfig
from speculators.runtime.verifier import Verifier

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
_DEFAULT_LENGTH = 4096


@dataclass(frozen=True)
class Metric:
    """A counter (`value`) or a vector of counters (`values`), under vLLM's Prometheus name."""

    name: str
    value: int = 0
    values: tuple[int, ...] = ()


class LLM:
    """A verifier, with or without a speculator, that generates.

    `model` is a speculator directory (verifier, method and depth follow from it) or a verifier (local folder or hub
    id), for which `speculative_config` may name the speculator. With its method `extract_hidden_states` and a
    `kv_transfer_config`, each request's hidden states are written to the file that its output names. The other keywords
    are vLLM's; one that this engine cannot honour raises EngineError naming it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
        trust_remote_code: bool = False,
        revision: str | None = None,
        gpu_memory_utilization: float | None = None,
        device: str | None = None,
        per_request_spec_decode_metrics: str | None = None,
        kv_transfer_config: Mapping[str, Any] | KVTransferConfig | None = None,
        additional_config: Mapping[str, Any] | None = None,
        **engine_keywords: Any,
    ) -> None:
        check_engine_keywords(engine_keywords)
        config = None if speculative_config is None else SpeculativeConfig.from_dict(speculative_config)
        additional = None if additional_config is None else AdditionalConfig.from_dict(additional_config)
        plan = infer(str(model), config, additional, revision=revision)
        transfer = _transfer(plan, kv_transfer_config)
        told = ModelDescription(
            plan.verifier, plan.verifier_revision, trust_remote_code, _tokenizer(tokenizer, plan, str(model))
        )
        build = prepare(plan, told)
        longest = _model_length(max_model_len, told)
        _check_drafted_length(plan, longest)
        limits = EngineLimits(
            _positive("max_num_seqs", max_num_seqs),
            longest,
            _positive("max_num_batched_tokens", max_num_batched_tokens),
            _prefix_caching(enable_prefix_caching, plan, told),
        )
        _check_metrics_level(per_request_spec_decode_metrics, plan)
        verifier = Verifier.from_pretrained(
            plan.verifier,
            dtype=dtype,
            device=device,
            revision=plan.verifier_revision,
            trust_remote_code=trust_remote_code,
            tokenizer=told.tokenizer_path,
        )
        _limit_memory(gpu_memory_utilization, verifier.device)
        recorder = None if transfer is None else _recorder(plan, transfer, verifier)
        self._take(verifier, plan, build, limits, seed, per_request_spec_decode_metrics, recorder)

    @classmethod
    def from_parts(
        cls,
        verifier: Verifier,
        speculator: Speculator | None = None,
        *,
        num_speculative_tokens: int | None = None,
        draft_sample_method: str = "greedy",
        additional: AdditionalConfig | None = None,
        limits: EngineLimits | None = None,
        seed: int = 0,
    ) -> "LLM":
        """Build on a verifier and a speculator that are loaded already; both keep belonging to the caller."""
        llm = cls.__new__(cls)
        config = None
        if speculator is not None:
            config = SpeculativeConfig(
                method=METHOD_OF_FAMILY[speculator.config.speculators_model_type],
                num_speculative_tokens=num_speculative_tokens or speculator.config.num_speculative_tokens,
                draft_sample_method=draft_sample_method,
            )
        plan = Plan(verifier.name_or_path, config, speculator)
        if additional is not None:
            add(plan, additional, num_speculative_tokens)
        limits = limits or EngineLimits(max_model_len=_model_length(None, verifier))
        llm._take(verifier, plan, prepare(plan, verifier), limits, seed, None)
        return llm

    def _take(
        self,
        verifier: Verifier,
        plan: Plan,
        build: Build | None,
        limits: EngineLimits,
        seed: int,
        level: str | None,
        recorder: HiddenStatesRecorder | None = None,
    ) -> None:
        proposer = None if build is None else build(verifier, limits)
        self.verifier, self.method = verifier, plan.method
        self.engine = choose_engine(plan)(
            verifier,
            proposer,
            limits=limits,
            seed=seed,
            metrics_level=level or "summary",
            recorder=recorder,
            depth=choose_depth(plan, proposer, verifier, limits),
            rule=choose_rule(plan),
        )
        self._count = 0

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts a verification at most, K; 0 without speculation."""
        return self.engine.num_speculative_tokens

    @property
    def extracts(self) -> bool:
        """Whether hidden states of requests are written."""
        return self.engine.recorder is not None

    @property
    def stats(self) -> SpecDecodeStats | None:
        """Counts over everything generated so far; None without speculation."""
        return self.engine.stats

    def get_tokenizer(self) -> Any:
        """The verifier's tokenizer."""
        return self.verifier.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: texts, token id lists, or dicts with `prompt` or `prompt_token_ids`; outputs in order.

        A completion whose constraints left no token to choose has finish reason "error", and its output's `error` tells
        why. StoreError where the hidden states of a request could not be written; the files of the others are there.
        """
        # mypy does not know what _is_batch has found.
        items: list[Prompt] = list(prompts) if _is_batch(prompts) else [prompts]  # type: ignore[list-item,arg-type]
        params = _one_per_prompt(sampling_params, len(items))
        with ExitStack() as abort_unless_done:
            abort_unless_done.callback(self.engine.abort_all)
            groups = [self._submit(item, chosen) for item, chosen in zip(items, params, strict=True)]
            done = {output.request_id: output for output in self._run(show=use_tqdm) if output.finished}
            abort_unless_done.pop_all()
        # What ended for want of a token that its constraints allow has a stop reason, and says so in its output.
        failed = [one for one in done.values() if one.error is not None and one.outputs[0].stop_reason is None]
        if failed:
            raise StoreError(f"hidden states of {len(failed)} of {len(done)} requests are lost: {failed[0].error}")
        return [_joined([done[request_id] for request_id in group]) for group in groups]

    def close(self) -> None:
        """End what runs, and the threads that write hidden states."""
        self.engine.abort_all()
        if self.engine.recorder is not None:
            self.engine.recorder.close()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several through the verifier's chat template."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [{"prompt_token_ids": self.chat_token_ids(one)} for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_token_ids(self, conversation: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt ids of a conversation, ready for the assistant's turn."""
        tokenizer = self.verifier.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise RequestError(
                f"verifier {self.verifier.name_or_path!r} has no chat template; use generate with plain prompts"
            )
        try:
            messages = [dict(message) for message in conversation]
            ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except (TemplateError, TypeError) as error:
            raise RequestError(
                f"the chat template of verifier {self.verifier.name_or_path!r} refuses this conversation: {error}"
            ) from error
        return [int(token) for token in ids]

    def get_metrics(self) -> list[Metric]:
        """Counters of speculative decoding and of prefix caching under vLLM's names, of what is turned on."""
        stats, prefixes, metrics = self.engine.stats, self.engine.prefixes, list[Metric]()
        if prefixes is not None:
            metrics += [
                Metric("vllm:prefix_cache_queries", prefixes.queries),
                Metric("vllm:prefix_cache_hits", prefixes.hits),
            ]
        if stats is None:
            return metrics
        return [
            *metrics,
            Metric("vllm:spec_decode_num_drafts", stats.num_drafts),
            Metric("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens),
            Metric("vllm:spec_decode_num_accepted_tokens", stats.num_accepted_tokens),
            Metric("vllm:spec_decode_num_accepted_tokens_per_pos", values=tuple(stats.accepted_per_position)),
        ]

    def _submit(self, prompt: Prompt, params: SamplingParams) -> list[str]:
        text, ids = self.prompt_ids(prompt)
        check_extraction(params, extracting=self.extracts, completions=params.n)
        names = []
        for choice, wanted in enumerate(params.choices()):
            name = f"{self._count}-{choice}" if params.n > 1 else str(self._count)
            self.engine.add_request(name, ids, wanted, prompt=text)
            names.append(name)
        self._count += 1
        return names

    def prompt_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (where it is known) and token ids of one prompt; RequestError when it is neither text nor ids."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), [int(token) for token in prompt["prompt_token_ids"]]
            prompt = prompt.get("prompt", prompt)
        if isinstance(prompt, str):
            if self.verifier.tokenizer is None:
                raise RequestError("the verifier has no tokenizer; give prompt_token_ids")
            return prompt, list(self.verifier.tokenizer(prompt)["input_ids"])
        if isinstance(prompt, Sequence):
            return None, [int(token) for token in prompt]
        raise RequestError(f"prompt {prompt!r}: expected a text, token ids, or a dict with prompt or prompt_token_ids")

    def _run(self, *, show: bool) -> Iterator[RequestOutput]:
        total = len(self.engine.waiting)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, disable=not show, transient=True) as progress:
            task = progress.add_task("generating", total=total)
            while self.engine.has_unfinished:
                outputs = self.engine.step()
                progress.advance(task, sum(output.finished for output in outputs))
                yield from outputs


def _transfer(plan: Plan, given: Mapping[str, Any] | KVTransferConfig | None) -> HiddenStatesOptions | None:
    if (plan.method == EXTRACT_METHOD) is (given is None):
        raise EngineError(
            f"LLM: speculative_config's method {plan.method!r} with kv_transfer_config={given!r}: the method "
            f"{EXTRACT_METHOD!r} and a kv_transfer_config belong together; give both or neither"
        )
    return None if given is None else parse_transfer_config(KVTransferConfig.from_user(given))


def _recorder(plan: Plan, options: HiddenStatesOptions, verifier: Verifier) -> HiddenStatesRecorder:
    if plan.layer_ids[-1] > verifier.num_layers:
        raise EngineError(
            f"speculative_config: {LAYER_IDS} has {plan.layer_ids[-1]}, but verifier {verifier.name_or_path!r} has "
            f"{verifier.num_layers} layers: 0 are the embeddings, {verifier.num_layers} the last layer's output"
        )
    writer = HiddenStatesWriter.from_options(options)
    writer.require_writable()
    return HiddenStatesRecorder(writer, plan.layer_ids)


def _tokenizer(asked: str | None, plan: Plan, model: str) -> str | None:
    """The tokenizer to read in place of the verifier's; none where a speculator says which verifier that is."""
    if asked is None or plan.verifier == model:
        return asked
    logger.warning(
        "LLM: tokenizer=%r is reset to %r, the verifier of the speculator %s that is served",
        asked,
        plan.verifier,
        model,
    )
    return None


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    first = outputs[0]
    completions = [replace(output.outputs[0], index=index) for index, output in enumerate(outputs)]
    return replace(first, request_id=first.request_id.partition("-")[0], outputs=completions)


def _is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str | Mapping):
        return False
    return not (len(prompts) > 0 and all(isinstance(item, int) for item in prompts))


def _one_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters for {count} prompts; give one, or one for each")
    return list(params)


def _positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineError(f"LLM: {name}={value!r}: expected a whole number above 0")
    return value


def _prefix_caching(asked: bool, plan: Plan, verifier: LanguageModel) -> bool:
    if not isinstance(asked, bool):
        raise EngineError(f"LLM: enable_prefix_caching={asked!r}: expected true or false")
    if asked and plan.method == EXTRACT_METHOD:
        raise EngineError(
            f"LLM: enable_prefix_caching, method {EXTRACT_METHOD!r}: hidden states are written of what is computed, "
            "so every prompt is computed whole; give one of the two"
        )
    if asked:
        require_prefix_caching(verifier)
    return asked


def _model_length(asked: int | None, verifier: LanguageModel) -> int:
    longest = verifier.max_length
    if asked is None:
        return min(longest or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if longest is not None and _positive("max_model_len", asked) > longest:
        raise EngineError(
            f"LLM: max_model_len={asked} is more than the {longest} positions of verifier {verifier.name_or_path!r}"
        )
    return asked


def _check_drafted_length(plan: Plan, longest: int) -> None:
    asked = None if plan.config is None else plan.config.max_model_len
    if asked is not None and asked > longest:
        raise EngineError(
            f"speculative_config: max_model_len={asked}: expected a whole number in [1, {longest}], the engine's own "
            "max_model_len"
        )


def _check_metrics_level(level: str | None, plan: Plan) -> None:
    if level not in (None, "none", "summary", "detailed"):
        raise EngineError(f"LLM: per_request_spec_decode_metrics={level!r}: expected none, summary or detailed")
    if level in ("summary", "detailed") and not plan.num_speculative_tokens:
        raise EngineError(f"LLM: per_request_spec_decode_metrics={level!r} requires speculative decoding to be enabled")


def _limit_memory(share: float | None, device: torch.device) -> None:
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise EngineError(f"LLM: gpu_memory_utilization={share!r}: expected a share in (0, 1]")
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(float(share), device)
