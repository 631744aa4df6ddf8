"""What all tests share."""

from __future__ import annotations

import warnings

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("fxspeed", deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile("fxspeed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden files anew, for a person to read")


@pytest.fixture(autouse=True)
def _steady():
    """The same numbers in every run."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
    torch.manual_seed(0)
    yield


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """`golden(name, text)`: the text equals tests/golden/name; `--regenerate` writes it."""

    def check(name: str, text: str) -> None:
        path = request.config.rootpath / "tests" / "golden" / name
        if request.config.getoption("--regenerate"):
            path.write_text(text)
        assert text == path.read_text()

    return check
