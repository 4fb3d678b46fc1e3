"""Directories that tests of whole methods share."""

import pytest

from tests.runtime.served import Directories


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Verifiers and drafts of every kind, each made when it is first asked for."""
    return Directories(tmp_path_factory.mktemp("served"))
