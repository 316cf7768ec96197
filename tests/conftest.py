"""What all tests share. Warnings are errors: see [tool.pytest.ini_options] in pyproject.toml."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Before torch is imported anywhere: unit tests run tiny tensors, where more threads only fight for the cores.
LIMITS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ADDED = {name: value for name, value in LIMITS.items() if name not in os.environ}
os.environ.update(ADDED)
# Nothing is to be fetched while testing; a test that tries must fail and not wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# `scripts/test &` in a script, `nohup` and CI systems have these ignored, and every process inherits that: no
# test of Ctrl-C or of a hang-up could work then.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

import hypothesis  # noqa: E402 - after the environment is set
import pytest  # noqa: E402

# No deadlines: on a shared machine they fail for reasons that are not the code's. In CI always the same
# examples.
hypothesis.settings.register_profile("local", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where whole runs keep the built-in model: it is made once, for all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "cache"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def user_env() -> dict[str, str]:
    """The environment a person would start a command in: without the limits that tests put on themselves."""
    return {name: value for name, value in os.environ.items() if name not in ADDED}
