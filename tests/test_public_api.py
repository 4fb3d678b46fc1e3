"""The public names, and that reading a speculator never costs the import of torch."""

import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import speculators

NAMES = {
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
}
HEAVY = ("torch", "transformers", "datasets", "accelerate", "fastapi", "matplotlib", "pandas")
# The limit leaves room for a busy machine; the best of several runs is compared.
STARTUP_SECONDS = 1.5


def test_public_names() -> None:
    assert set(speculators.__all__) == NAMES
    assert len(speculators.__all__) == len(NAMES)
    for name in NAMES:
        assert getattr(speculators, name) is not None
    assert set(dir(speculators)) >= NAMES


def test_public_objects_know_their_home() -> None:
    homes = {name: getattr(speculators, name).__module__ for name in NAMES - {"__version__"}}
    assert all(home.startswith("speculators.") for home in homes.values())
    assert issubclass(speculators.SpeculatorsError, Exception)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Speculater'; public names: LLM, "):
        _ = speculators.Speculater


def test_version_is_that_of_the_distribution() -> None:
    assert speculators.__version__ == metadata.version("speculators")


def run_and_list_modules(code: str) -> tuple[set[str], float]:
    """Run code in a fresh interpreter; return the modules it has imported at its end, and the seconds it took."""
    script = f"import sys\n{code}\nprint('\\n' + __import__('json').dumps(sorted(sys.modules)))"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    return set(json.loads(done.stdout.splitlines()[-1])), seconds


def command(*arguments: str) -> str:
    return (
        f"from speculators.cli import main\ntry:\n    main({list(arguments)!r})\n"
        "except SystemExit as ended:\n    assert ended.code == 0, ended.code"
    )


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import speculators", id="import"),
        pytest.param(command("--version"), id="version"),
        pytest.param(command("--help"), id="help"),
        pytest.param("import speculators.formats.vllm, speculators.models", id="formats"),
    ],
)
def test_starting_is_cheap(code: str) -> None:
    best = float("inf")
    for _ in range(5):
        modules, seconds = run_and_list_modules(code)
        assert not modules.intersection(HEAVY)
        best = min(best, seconds)
        if best < STARTUP_SECONDS:
            return
    pytest.fail(f"took {best:.2f} s at best, expected less than {STARTUP_SECONDS} s")


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_reading_a_directory_needs_no_torch(verb: str, tiny_speculator: Path) -> None:
    modules, _ = run_and_list_modules(command(verb, str(tiny_speculator)))
    assert not modules.intersection(HEAVY)


def test_configurations_of_every_family_need_no_torch() -> None:
    code = (
        "from speculators.models import FAMILIES\n"
        "for family in FAMILIES.values():\n    assert family.config and family.draft"
    )
    modules, _ = run_and_list_modules(code)
    assert not modules.intersection(HEAVY)
