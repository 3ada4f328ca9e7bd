"""What `doctor` says of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

NOWHERE = {
    "DOCKER_HOST": "unix:///no/such.sock",
    "MODAL_CONFIG_PATH": "/no/such.toml",
    "MODAL_TOKEN_ID": "",
    "MODAL_TOKEN_SECRET": "",
}


def doctor(**env: str) -> tuple[int, dict[str, str]]:
    """Returns the exit code, and yes, no or NO for each finding."""
    command = [sys.executable, "-m", "swegym_tutorial.cli", "doctor"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TINKER_", "DOCKER_"))}
    done = subprocess.run(
        command, env={**clean, **NOWHERE, **env}, capture_output=True, text=True, timeout=300
    )
    assert not done.stderr, done.stderr
    found = re.findall(r"^  (yes|no|NO ) +([\w-]+(?: [\w-]+)*)  ", done.stdout, re.M)
    return done.returncode, {what: mark.strip() for mark, what in found} | {
        "end": done.stdout.splitlines()[-1]
    }


@pytest.mark.slow
def test_the_laptop_run_is_judged_where_no_server_is_named() -> None:
    code, found = doctor()
    assert (code, found["end"]) == (0, "The laptop run works here.")
    assert found["local server"] == found["local sandbox"] == found["bundled tasks"] == "yes"
    assert found["docker sandbox"] == found["modal sandbox"] == found["Tinker server"] == "no"


@pytest.mark.slow
def test_the_full_run_is_judged_where_its_server_is_named() -> None:
    code, found = doctor(TINKER_BASE_URL="http://127.0.0.1:9", TINKER_API_KEY="tml-x")
    assert (code, found["end"]) == (1, "The full run does not work here yet: mend each NO above.")
    assert found["Tinker server"] == found["docker sandbox"] == found["modal sandbox"] == "NO"
    assert found["local server"] == "yes"
