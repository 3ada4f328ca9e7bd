"""The workflow for GitHub: it does what .ci/run does, and keeps what a person may want to look at."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
ARTIFACTS = "SWEGYM_TUTORIAL_ARTIFACTS"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def job(workflow: dict[Any, Any]) -> dict[str, Any]:
    (only,) = workflow["jobs"].values()
    return only


def test_each_push_and_pull_request_is_tested_with_few_rights(workflow: dict[Any, Any]) -> None:
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 takes `on` for a truth value
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "github.ref" in workflow["concurrency"]["group"]


def test_it_runs_the_same_script_on_the_same_python_in_bounded_time(job: dict[str, Any]) -> None:
    commands = [step["run"].strip() for step in job["steps"] if "run" in step]
    assert commands == ["bash .ci/run"]
    assert (ROOT / ".ci" / "run").is_file()
    assert not [step for step in job["steps"] if step.get("continue-on-error")]
    assert job["runs-on"] == "ubuntu-latest" and job["container"]["image"].startswith("python:3.11-")
    assert 30 <= job["timeout-minutes"] <= 90


def test_it_takes_the_small_build_of_torch_that_the_readme_names(job: dict[str, Any]) -> None:
    index = job["env"]["PIP_EXTRA_INDEX_URL"]
    assert f"PIP_EXTRA_INDEX_URL={index}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_executed_notebooks_and_screenshots_are_kept_also_of_a_failure(job: dict[str, Any]) -> None:
    uploads = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert all(step["if"] == "always()" for step in uploads)
    folder = job["env"][ARTIFACTS]
    kept = {step["with"]["path"] for step in uploads}
    assert kept == {f"{folder}/notebooks", f"{folder}/browser"}
    for writer in ("tests/test_notebooks.py", "tests/browser/conftest.py"):
        assert ARTIFACTS in (ROOT / writer).read_text(encoding="utf-8"), writer


def test_actions_have_major_versions(job: dict[str, Any]) -> None:
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and not [name for name in used if not re.fullmatch(r"actions/[a-z-]+@v\d+", name)]


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(["actionlint", "-no-color", str(WORKFLOW)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
