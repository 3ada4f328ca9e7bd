"""The whole flow with the SDK of this environment, and with other releases of it, each in its own environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tinker

from swegym_tutorial.server.process import LocalServer

ROOT = Path(__file__).parents[2]
FLOW = Path(__file__).with_name("sdk_flow.py")


def run_flow(python: Path | str, server: LocalServer) -> str:
    command = [str(python), str(FLOW), server.url, server.key, "tiny"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def test_the_installed_sdk(server: LocalServer) -> None:
    assert run_flow(sys.executable, server) == f"ok {tinker.__version__}\n"


@pytest.mark.sdks
@pytest.mark.parametrize("release", ["0.24.1", "0.38.0"])
def test_another_sdk(server: LocalServer, release: str) -> None:
    python = ROOT / f".venv-sdk-{release}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: `make sdks` builds it"
    assert run_flow(python, server) == f"ok {release}\n"
