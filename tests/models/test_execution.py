"""Gradient checkpointing and torch.compile: what they compute is what is computed without them, in every family."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculators.errors import TrainingError
from speculators.models import FAMILIES
from speculators.models.draft_model import PackedBatch, StepOutput
from speculators.models.execution import Execution, launches_triton, require_compiler, require_triton
from speculators.models.speculator import Speculator
from tests.allocations import Allocations
from tests.models.contract import contract_of
from tests.models.drafts import gradients, pack, random_speculator, verifier_head
from tests.models.pitfalls import draft_of, every_family, objective_of

CASES = [(family, variant) for family in FAMILIES for variant in contract_of(family).variants]
MASKS = [[1] * 13, [0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1]]
# More layers than the contract's smallest variant, so that they are what fills the memory.
DEEP: dict[str, dict[str, Any]] = {
    "eagle3": {"num_layers": 3},
    "peagle": {"num_layers": 4},
    "eagle": {"num_layers": 3},
    "dflash": {"num_layers": 4},
    "dflash2": {"num_layers": 4},
    "dspark": {"num_layers": 4, "markov_head_type": "gated"},
    "medusa": {"num_layers": 4},
}


def batch_for(speculator: Speculator, masks: list[list[int]], row: int, seed: int = 2) -> PackedBatch:
    return pack(masks, row=row, num_aux=len(speculator.draft.aux_layer_ids), seed=seed)


def step_of(
    family: str, speculator: Speculator, batch: PackedBatch, execution: Execution
) -> tuple[StepOutput, dict[str, Tensor]]:
    """One step and its gradients, by name."""
    speculator.draft.execute(execution)
    torch.manual_seed(0)
    output = objective_of(family).step(speculator.draft.train(), batch, verifier_head())
    output.loss.backward()
    return output, gradients(speculator.draft)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_checkpointed_losses_and_gradients_are_the_same_to_the_bit(family: str, variant: str) -> None:
    speculator = random_speculator(family, **contract_of(family).variants[variant])
    batch = batch_for(speculator, MASKS, 28)
    kept, expected = step_of(family, speculator, batch, Execution())
    again, found = step_of(family, speculator, batch, Execution(gradient_checkpointing=True))
    assert kept.metrics["loss"].count > 0
    assert torch.equal(again.loss, kept.loss)
    assert again.metrics == kept.metrics
    assert found.keys() == expected.keys()
    assert [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])] == []


@every_family
def test_checkpointing_keeps_less_for_the_backward(family: str) -> None:
    """Bytes that a loss keeps alive after the forward of a document of 300 tokens."""
    speculator = draft_of(family, **DEEP.get(family, {}))
    batch, kept = batch_for(speculator, [[1] * 300], 300), {}
    for checkpointing in (False, True):
        speculator.draft.execute(Execution(gradient_checkpointing=checkpointing))
        with Allocations() as allocations:
            output = objective_of(family).step(speculator.draft.train(), batch, verifier_head())
        kept[checkpointing] = allocations.live
        del output
        assert allocations.live < kept[checkpointing] / 20
    assert kept[True] < 0.6 * kept[False], kept


def test_serving_runs_no_part_twice() -> None:
    speculator = draft_of("eagle3")
    speculator.draft.execute(Execution(gradient_checkpointing=True, attention="blocks"))
    calls = []
    with torch.no_grad():
        assert speculator.draft.segment(lambda x: calls.append(1) or x + 1, torch.zeros(1)).item() == 1
    assert calls == [1]


def require_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every gradient within 1e-4 of its norm: drafts of random weights have losses around 20, whose rounding counts."""
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in found}
    assert max(apart.values()) < 1e-4, apart


# torch.compile itself looks for gradients of the tensors that it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.full
@every_family
def test_compiled_losses_are_those_of_eager_execution(family: str) -> None:
    """Batches of three shapes: losses within 1e-5, gradients 1e-4, and nothing is compiled anew for the third."""
    torch._dynamo.reset()
    speculator = draft_of(family)
    assert any(getattr(module, "compiles", None) is False for module in speculator.draft.modules())
    graphs = []
    for seed, masks in enumerate(([[1] * 21, [1] * 9], [[1] * 17, [0, *[1] * 12]], [[0, *[1] * 24], [1] * 11])):
        batch = batch_for(speculator, masks, 40, seed)
        eager, expected = step_of(family, speculator, batch, Execution())
        torch._dynamo.utils.counters.clear()
        compiled, found = step_of(family, speculator, batch, Execution(compile=True))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch.testing.assert_close(compiled.loss, eager.loss, rtol=1e-5, atol=1e-5)
        require_near(found, expected)
    both = step_of(family, speculator, batch, Execution(compile=True, gradient_checkpointing=True))
    torch.testing.assert_close(both[0].loss, eager.loss, rtol=1e-5, atol=1e-5)
    require_near(both[1], expected)
    assert graphs[0] > 0
    assert graphs[2] == 0


def test_a_missing_compiler_is_named_before_the_first_step() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    require_compiler(cpu)
    with pytest.raises(TrainingError, match=r"C\+\+ compiler, and no-such-compiler is not on the PATH.*CXX"):
        require_compiler(cpu, {"CXX": "no-such-compiler"})
    with pytest.raises(TrainingError, match=r"C compiler, and gcc or clang is not on the PATH.*train\.compile"):
        require_compiler(gpu, {"PATH": ""})


def test_kernels_of_losses_are_refused_where_triton_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    message = r"losses 'triton' have no kernels for 'cpu'.*train\.losses to 'auto'.*TRITON_INTERPRET=1"
    with pytest.raises(TrainingError, match=message):
        require_triton(cpu, {})
    require_triton(cpu, {"TRITON_INTERPRET": "1"})
    require_triton(gpu, {"CC": sys.executable})
    with pytest.raises(TrainingError, match=r"'triton' needs a C compiler, and gcc or clang is not on.*train\.losses"):
        require_triton(gpu, {"PATH": ""})
    with pytest.raises(TrainingError, match=r"C compiler, and no-such-compiler is not on the PATH.*CC name another"):
        require_triton(gpu, {"CC": "no-such-compiler"})
    assert launches_triton(gpu, {"CC": sys.executable})
    assert not launches_triton(gpu, {"PATH": ""})
    assert not launches_triton(cpu, {"CC": sys.executable})
    speculator = draft_of("eagle3")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(TrainingError, match=message):
        speculator.draft.execute(Execution(losses="triton"))
    assert speculator.draft.execution == Execution()


def test_a_fused_kernel_is_refused_where_it_has_no_backward() -> None:
    speculator = draft_of("eagle3")
    with pytest.raises(TrainingError, match=r"'flex' has no backward on 'cpu'.*train\.attention"):
        speculator.draft.execute(Execution(attention="flex"))
    assert speculator.draft.execution == Execution()
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    auto = Execution()
    assert [auto.uses_flex(cpu), auto.uses_flex(gpu)] == [False, True]
    assert not replace(auto, attention="blocks").uses_flex(gpu)
