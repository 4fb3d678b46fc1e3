"""Acceptance, speed and identity of a speculator, measured with the loop that serves."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from speculators.errors import RequestError
from speculators.models.cache import SlotWrite
from speculators.models.speculator import Speculator
from speculators.runtime.engine import EngineLimits
from speculators.runtime.llm import LLM
from speculators.runtime.outputs import RequestOutput
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.stats import SpecDecodeStats
from speculators.runtime.verifier import Verifier

Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EvaluateOptions:
    """What is measured: K (None = the speculator's), output tokens a prompt, temperature, batch size, seed."""

    num_speculative_tokens: int | None = None
    max_new_tokens: int = 96
    temperature: float = 0.0
    max_num_seqs: int = 1
    seed: int = 0

    def sampling(self) -> SamplingParams:
        """The sampling parameters every prompt is answered with."""
        seed = None if self.temperature == 0 else self.seed
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_new_tokens, seed=seed)


def measure_acceptance(
    verifier: Verifier,
    speculator: Speculator,
    conversations: Sequence[Conversation | Sequence[int]],
    options: EvaluateOptions,
) -> SpecDecodeStats:
    """Counts of speculative decoding over conversations, or prompts of token ids, without a comparison."""
    llm, _, _ = _run(verifier, speculator, conversations, options, show=False)
    assert llm.stats is not None
    return llm.stats


def measure_each(
    verifier: Verifier,
    speculator: Speculator,
    conversations: Sequence[Conversation | Sequence[int]],
    options: EvaluateOptions,
) -> list[SpecDecodeStats]:
    """The same counts for each prompt alone, in order; zeros for one that was answered without a draft."""
    llm, outputs, _ = _run(verifier, speculator, conversations, options, show=False)
    found = [output.outputs[0].spec_decode_metrics for output in outputs]
    return [SpecDecodeStats(llm.num_speculative_tokens) if one is None else one.stats for one in found]


def evaluate(
    verifier: Verifier,
    speculator: Speculator,
    conversations: Sequence[Conversation],
    options: EvaluateOptions,
    *,
    speculator_name: str,
    show: bool = True,
) -> dict[str, Any]:
    """Answer every conversation with and without speculation and report both, as `evaluation.json` holds it.

    Greedy outputs are compared token for token; where they differ, the first differing position and the gap between the
    verifier's two likeliest logits there are given, which tells rounding from a fault. At a temperature there is no
    identity to check, and `identical` is None. Speeds are tokens per second of whole requests, prompts included.
    """
    if not conversations:
        raise RequestError("there is nothing to evaluate: no prompts; give a JSONL file with at least one row")
    warm = EvaluateOptions(options.num_speculative_tokens, 8, 0.0, options.max_num_seqs)
    for draft in (None, speculator):
        _run(verifier, draft, conversations[:1], warm, show=False)
    _, plain, plain_speed = _run(verifier, None, conversations, options, show=show)
    llm, drafted, speed = _run(verifier, speculator, conversations, options, show=show)
    stats = llm.stats
    assert stats is not None
    return {
        "verifier": verifier.name_or_path,
        "speculator": speculator_name,
        "method": speculator.config.speculators_model_type,
        "num_speculative_tokens": llm.num_speculative_tokens,
        "num_prompts": len(conversations),
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "max_num_seqs": options.max_num_seqs,
        "acceptance_length": stats.acceptance_length,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "accepted_per_position": stats.accepted_per_position,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position,
        "conditional_acceptance_per_position": stats.conditional_acceptance_per_position,
        "speed": {
            "dtype": _name(verifier.dtype),
            "plain": plain_speed,
            "speculative": speed,
            "speedup": speed / plain_speed,
        },
        "identity": _identity(verifier, plain, drafted, greedy=options.temperature == 0),
    }


def _run(
    verifier: Verifier,
    speculator: Speculator | None,
    conversations: Sequence[Conversation | Sequence[int]],
    options: EvaluateOptions,
    *,
    show: bool,
) -> tuple[LLM, list[RequestOutput], float]:
    longest = verifier.max_length or 2**31
    limits = EngineLimits(max_num_seqs=min(options.max_num_seqs, len(conversations)), max_model_len=longest)
    llm = LLM.from_parts(
        verifier, speculator, num_speculative_tokens=options.num_speculative_tokens, limits=limits, seed=options.seed
    )
    started = time.perf_counter()
    prompts = [{"prompt_token_ids": _token_ids(llm, one)} for one in conversations]
    outputs = llm.generate(prompts, options.sampling(), use_tqdm=show)
    seconds = time.perf_counter() - started
    return llm, outputs, sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def _token_ids(llm: LLM, asked: Conversation | Sequence[int]) -> list[int]:
    messages = [item for item in asked if isinstance(item, Mapping)]
    return llm.chat_token_ids(messages) if messages else [item for item in asked if isinstance(item, int)]


def _identity(
    verifier: Verifier, plain: list[RequestOutput], drafted: list[RequestOutput], *, greedy: bool
) -> dict[str, Any]:
    if not greedy:
        return {"dtype": _name(verifier.dtype), "identical": None, "first_difference": None, "top2_gap": None}
    answers = [output.outputs[0].token_ids for output in plain]
    positions = first_differences(answers, [output.outputs[0].token_ids for output in drafted])
    gaps = [
        None if at is None else top2_gap(verifier, [*output.prompt_token_ids, *ids[:at]])
        for output, ids, at in zip(plain, answers, positions, strict=True)
    ]
    identical = all(position is None for position in positions)
    return {"dtype": _name(verifier.dtype), "identical": identical, "first_difference": positions, "top2_gap": gaps}


def first_differences(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[int | None]:
    """Where each two answers differ first, or where the shorter one ends; None where they are the same."""
    places: list[int | None] = []
    for one, other in zip(answers, others, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        places.append(None if list(one) == list(other) else at)
    return places


def top2_gap(verifier: Verifier, token_ids: list[int]) -> float:
    """How far the verifier's two likeliest logits lie apart after these tokens."""
    write = SlotWrite.at(slice(0, 1), [0], len(token_ids), verifier.device)
    ids = torch.tensor([token_ids], device=verifier.device)
    out = verifier.forward(ids, verifier.make_cache(1), write)
    assert out.logits_BTV is not None
    top = out.logits_BTV[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_report(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a report as JSON, atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, target)


def report_table(report: Mapping[str, Any]) -> Table:
    """The report as a table for the terminal."""
    table = Table(title=f"{report['method']} on {report['num_prompts']} prompts, K={report['num_speculative_tokens']}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("acceptance length", f"{report['acceptance_length']:.2f}")
    pairs = zip(report["acceptance_rate_per_position"], report["conditional_acceptance_per_position"], strict=True)
    for position, (rate, conditional) in enumerate(pairs):
        table.add_row(f"accepted at position {position + 1} (given the one before)", f"{rate:.3f} ({conditional:.3f})")
    speed, identity = report["speed"], report["identity"]
    table.add_row(f"tokens/s plain ({speed['dtype']})", f"{speed['plain']:.1f}")
    table.add_row("tokens/s with speculation", f"{speed['speculative']:.1f} (x{speed['speedup']:.2f})")
    table.add_row(f"output identical ({identity['dtype']})", _verdict(identity))
    return table


def _verdict(identity: Mapping[str, Any]) -> str:
    if identity["identical"] is None:
        return "not checked (sampled)"
    if identity["identical"]:
        return "yes"
    places = [
        f"prompt {i}: token {at}, gap {gap:.1e}"
        for i, (at, gap) in enumerate(zip(identity["first_difference"], identity["top2_gap"], strict=True))
        if at is not None
    ]
    return "no: " + "; ".join(places[:3]) + (" ..." if len(places) > 3 else "")


def plot_report(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw acceptance per position and speeds into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    positions = range(1, len(report["acceptance_rate_per_position"]) + 1)
    left.bar([p - 0.2 for p in positions], report["acceptance_rate_per_position"], 0.4, label="of all steps")
    left.bar(
        [p + 0.2 for p in positions], report["conditional_acceptance_per_position"], 0.4, label="given the one before"
    )
    left.set(title=f"acceptance length {report['acceptance_length']:.2f}", xlabel="draft position", ylim=(0, 1))
    left.set_xticks(list(positions))
    left.legend(frameon=False, fontsize=8)
    speed = report["speed"]
    right.bar(["plain", "speculative"], [speed["plain"], speed["speculative"]], color=["0.6", "tab:blue"])
    right.set(title=f"tokens per second ({speed['dtype']}), x{speed['speedup']:.2f}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
