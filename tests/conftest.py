"""What every test shares: an offline process and tiny verifiers made once."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Triton reads this once, when it is imported: on a CPU, its kernels run in its interpreter.
os.environ["TRITON_INTERPRET"] = "1"

import pytest

# A shell that starts the tests in the background makes its children deaf to Ctrl-C; tests of interruption need ears.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random 8-layer Llama (hidden size 64, 384 tokens), its tokenizer and a chat template."""
    from tests.tiny_models import make_verifier

    return make_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="session")
def tied_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the output head tied to the embeddings."""
    from tests.tiny_models import make_verifier

    return make_verifier(tmp_path_factory.mktemp("tied_verifier"), tie_word_embeddings=True, seed=1)


@pytest.fixture(scope="session")
def tiny_speculator(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained EAGLE-3 speculator for `tiny_verifier` with 128 draft tokens."""
    from tests.tiny_models import make_speculator

    return make_speculator(tmp_path_factory.mktemp("speculator") / "tiny", tiny_verifier)
