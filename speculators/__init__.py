"""Train, evaluate and serve the draft models of speculative decoding.

The public names below are imported when they are first used, so that `import speculators` costs milliseconds and the
parts that only read configuration never load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speculators.errors import SpeculatorsError
    from speculators.models.speculator import Speculator
    from speculators.runtime.llm import LLM
    from speculators.runtime.outputs import CompletionOutput, RequestOutput
    from speculators.runtime.sampling import SamplingParams
    from speculators.runtime.structured_outputs import StructuredOutputsParams
    from speculators.runtime.transfer import KVTransferConfig
    from speculators.train.recipe import Recipe, run

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "KVTransferConfig",
    "Recipe",
    "RequestOutput",
    "SamplingParams",
    "Speculator",
    "SpeculatorsError",
    "StructuredOutputsParams",
    "__version__",
    "run",
]

_HOMES = {
    "LLM": "speculators.runtime.llm",
    "CompletionOutput": "speculators.runtime.outputs",
    "KVTransferConfig": "speculators.runtime.transfer",
    "Recipe": "speculators.train.recipe",
    "RequestOutput": "speculators.runtime.outputs",
    "SamplingParams": "speculators.runtime.sampling",
    "Speculator": "speculators.models.speculator",
    "SpeculatorsError": "speculators.errors",
    "StructuredOutputsParams": "speculators.runtime.structured_outputs",
    "run": "speculators.train.recipe",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'speculators' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
