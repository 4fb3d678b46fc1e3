"""What only a GPU can show: that training and serving there compute what they compute on the CPU.

    python benchmarks/gpu_check.py [--device cuda] [--out out/gpu_check.json]

On a tiny random verifier: hidden states, the loss and every gradient norm of one training step agree with the CPU's in
float32; a draft trained on the device on a few answers drafts them well there; greedy float32 outputs with drafts equal
those without, one request at a time and batched. In bfloat16 the same is reported, not required, since the width of a
batch changes rounding. On a GPU, losses by Triton's kernels agree with those by torch in float32, and both are measured
in bfloat16 over a large vocabulary: tokens a second, and peak memory above what states and heads take. Verification by
Triton's kernels there emits what the readable reference emits on the CPU, and both are measured on the GPU. Exit code 1
where a required check fails.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from speculators.extract.store import HiddenStatesStore
from speculators.formats.verifier_weights import load_verifier_weights
from speculators.models.eagle3.objective import Eagle3Objective
from speculators.models.execution import LossKernel
from speculators.models.loss_choice import LossChoice, gpu_milliseconds
from speculators.models.losses import Head, TokenLoss, VerifierHead, data_cross_entropy
from speculators.models.speculator import Speculator
from speculators.runtime import rejection
from speculators.runtime.llm import LLM
from speculators.runtime.rules import implementation
from speculators.runtime.sampling import SamplingParams
from speculators.runtime.verifier import Verifier
from speculators.train.dataset import PackedRows
from tests.runtime.verification_cases import LAWS, SHAPES, cases
from tests.tiny_models import SENTENCES
from tests.vllm.tiny_speculator import train_tiny_speculator

MAX_TOKENS = 48
RELATIVE = 2e-3
VOCABULARY, TOKENS, WIDTH = 150_000, 4096, 4096
# A vocabulary that fills no block of a kernel, and so few rows that a chunk has one or two.
SMALL = {"vocabulary": 5001, "tokens": 37, "width": 64}
LOSSES = ("kl_div", "ce", "labels")
# Rows, drafts and vocabulary of a verification that is served.
SERVED = (16, 7, VOCABULARY)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value."""
    left, right = left.float().cpu(), right.float().cpu()
    return float((left - right).abs().max() / right.abs().max().clamp(min=1e-9))


def states_differ_by(verifier: Path, device: str) -> float:
    rows = [[5, 9, 200, 31, 7], [8, 8, 300], list(range(2, 40))]
    layers = [0, 2, 4, 8]
    here = Verifier.from_pretrained(verifier, dtype="float32", device="cpu").capture(rows, layers)
    there = Verifier.from_pretrained(verifier, dtype="float32", device=device).capture(rows, layers)
    return max(largest_difference(a, b) for a, b in zip(there, here, strict=True))


def step_of(speculator: Path, store: HiddenStatesStore, device: str) -> dict[str, float]:
    """Loss and gradient norms of one training step over one packed row."""
    loaded = Speculator.from_pretrained(speculator, dtype=torch.float32, device=device)
    weights = load_verifier_weights(loaded.config.verifier.name_or_path)
    draft = loaded.attach_verifier(weights).to(device, torch.float32).draft.train()
    head = VerifierHead.from_weights(weights).to(device, torch.float32)
    batch = PackedRows(store, 1024).batch(0, [0]).to(device, torch.float32)
    output = Eagle3Objective(ttt_steps=3).step(draft, batch, head)
    output.loss.backward()
    norms = {name: float(p.grad.norm()) for name, p in draft.named_parameters() if p.grad is not None}
    return {"loss": float(output.loss.detach()), **norms}


def step_differs_by(speculator: Path, states: Path, device: str) -> float:
    store = HiddenStatesStore.open(states)
    here, there = step_of(speculator, store, "cpu"), step_of(speculator, store, device)
    if here.keys() != there.keys():
        return float("inf")
    return max(abs(there[name] - value) / max(abs(value), 1e-9) for name, value in here.items())


def decode(
    model: str, prompts: Sequence[list[int]], device: str, dtype: str, batch: int
) -> tuple[list[list[int]], Any]:
    llm = LLM(model, dtype=dtype, device=device, max_num_seqs=batch)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm.stats


def decoding(speculator: Path, verifier: Path, device: str, dtype: str, batch: int) -> dict[str, Any]:
    chat = LLM(str(verifier), dtype=dtype, device=device)
    prompts = [chat.chat_token_ids([{"role": "user", "content": text}]) for text in SENTENCES]
    plain, _ = decode(str(verifier), prompts, device, dtype, batch)
    drafted, stats = decode(str(speculator), prompts, device, dtype, batch)
    return {"dtype": dtype, "batch": batch, "identical": plain == drafted, "acceptance_length": stats.acceptance_length}


class LossCase:
    """Random states and frozen heads, and one loss of them with its gradient by the draft's states."""

    def __init__(self, device: str, dtype: torch.dtype, *, vocabulary: int, tokens: int, width: int) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int) -> torch.Tensor:
            return torch.randn(rows, width, generator=generator, device=device, dtype=dtype)

        self.hidden, self.teacher = random(tokens).requires_grad_(), random(tokens)
        self.draft_head, self.teacher_head = (Head(random(vocabulary) / width**0.5) for _ in range(2))
        self.rows = torch.arange(tokens, device=device)

    def losses(self, name: str, choice: LossChoice, chunk_rows: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
        """The losses [N] and their sum's gradient [N, H]; of "labels", those of a token a row."""
        if name == "labels":
            found, _ = data_cross_entropy(self.hidden, self.draft_head, self.rows, chunk_rows, choice)
        else:
            loss = TokenLoss({name: 1.0}, chunk_rows, with_total_variation=name == "kl_div", choice=choice)
            found = loss(self.hidden, self.draft_head, self.teacher, self.teacher_head, self.rows).loss
        return found.detach(), torch.autograd.grad(found.sum(), self.hidden)[0]


def losses_differ_by(device: str) -> float:
    case = LossCase(device, torch.float32, **SMALL)
    pairs = [
        zip(case.losses(name, LossChoice("triton"), 2), case.losses(name, LossChoice("torch"), 2), strict=True)
        for name in LOSSES
    ]
    return max(largest_difference(found, expected) for pair in pairs for found, expected in pair)


def loss_speed(case: LossCase, name: str, kernel: LossKernel) -> dict[str, Any]:
    """One loss by one implementation: its speed, and its peak memory."""
    choice = LossChoice(kernel)
    case.losses(name, choice)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.losses(name, choice)
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    milliseconds = gpu_milliseconds(lambda: case.losses(name, choice))
    return {
        "loss": name,
        "kernel": kernel,
        "tokens_per_second": round(1000 * len(case.rows) / milliseconds),
        "peak_mib": round(peak, 1),
    }


def loss_speeds(device: str) -> dict[str, Any]:
    """Both implementations of each loss at full size, and what "auto" takes there."""
    case = LossCase(device, torch.bfloat16, vocabulary=VOCABULARY, tokens=TOKENS, width=WIDTH)
    kernels: tuple[LossKernel, ...] = ("torch", "triton")
    rows = [loss_speed(case, name, kernel) for name in LOSSES for kernel in kernels]
    auto = LossChoice()
    for name in LOSSES:
        case.losses(name, auto)
    measured = [{**asdict(one), "taken": one.faster} for one in auto.news()]
    return {"vocabulary": VOCABULARY, "tokens": TOKENS, "width": WIDTH, "rows": rows, "auto": measured}


def verifications_differ(device: str) -> list[str]:
    """Rules and shapes that emit something else on a device than the reference does on the CPU."""
    kernels = implementation(torch.device(device))
    return [
        f"{case.function} {shape} {laws}"
        for shape, laws in [*product(SHAPES, LAWS), (SERVED, "plain")]
        for case in cases(shape, laws)
        if not case.agrees(kernels, device)
    ]


def verification_speeds(device: str) -> list[dict[str, Any]]:
    """Milliseconds of each rule at the size that is served, by torch's operations and by Triton's kernels."""
    kernels, rows = implementation(torch.device(device)), []
    for case in cases(SERVED):
        arguments = case.on(device)
        torch_ms = gpu_milliseconds(partial(getattr(rejection, case.function), *arguments))
        triton_ms = gpu_milliseconds(partial(getattr(kernels, case.function), *arguments))
        times = {"torch_ms": round(torch_ms, 4), "triton_ms": round(triton_ms, 4)}
        rows.append({"function": case.function, "drafts": case.drafts, **times})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check.json"))
    args = parser.parse_args()
    on_gpu = args.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device is available here")
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speculator = train_tiny_speculator(folder, SENTENCES, MAX_TOKENS)
        verifier = folder / "verifier"
        states = states_differ_by(verifier, args.device)
        step = step_differs_by(speculator, folder / "run" / "states", args.device)
        decoded = [
            decoding(speculator, verifier, args.device, dtype, batch)
            for dtype in ("float32", "bfloat16")
            for batch in (1, len(SENTENCES))
        ]
    exact = [one for one in decoded if one["dtype"] == "float32"]
    checks = {
        "states_agree": states < RELATIVE,
        "training_step_agrees": step < RELATIVE,
        "outputs_identical": all(one["identical"] for one in exact),
        "drafts_accepted": all(one["acceptance_length"] > 2 for one in exact),
    }
    device = torch.cuda.get_device_name() if on_gpu else args.device
    report = {"device": device, "states": states, "step": step, "decoding": decoded, "checks": checks}
    if on_gpu:
        report["losses"] = {"difference": losses_differ_by(args.device), **loss_speeds(args.device)}
        checks["losses_agree"] = report["losses"]["difference"] < RELATIVE
        wrong = verifications_differ(args.device)
        by_kernels = implementation(torch.device(args.device)) is not rejection
        checks["verifications_agree"] = by_kernels and not wrong
        report["verification"] = {"shape": SERVED, "differing": wrong, "rules": verification_speeds(args.device)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
