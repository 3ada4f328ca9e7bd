"""The project's own promises: quick imports, files that agree with each other."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


HEAVY = (
    "torch",
    "transformers",
    "tinker",
    "modal",
    "docker",
    "matplotlib",
    "IPython",
    "ipywidgets",
    "rich",
    "swegym",
)


def test_importing_the_package_is_quiet_and_brings_nothing_heavy():
    done = python(f"import swegym_tutorial, sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_command_brings_nothing_heavy_before_it_needs_it():
    done = python(f"import swegym_tutorial.cli, sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    done = python(
        "import swegym_tutorial as s; [getattr(s, n) for n in s.__all__]; print(sorted(s._HOMES) == s.__all__)"
    )
    assert done.stdout.strip() == "True", done.stderr


def test_case_48_environment_yml_has_no_pip_section_and_agrees_with_pyproject():
    # conda#14557, matchms#216: a pip section with the project itself in it breaks; installing it is a second step.
    text = (ROOT / "environment.yml").read_text()
    entries = yaml.safe_load(text)["dependencies"]
    assert all(isinstance(entry, str) for entry in entries)
    assert "pip install -e" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["notebooks"]]
    names = {re.split(r"[\[<>=;! ]", w, maxsplit=1)[0]: w.replace(" ", "") for w in wanted}
    for entry in entries:
        name = re.split(r"[<>=]", entry, maxsplit=1)[0]
        if name not in ("python", "pip", "git"):
            assert names[name] == entry
    assert project["requires-python"] == ">=3.11" and "python=3.11" in entries


def test_every_skip_gives_its_reason():
    pattern = re.compile(r"pytest\.skip\(|mark\.skip|importorskip|mark\.xfail")
    for path in (ROOT / "tests").rglob("*.py"):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not pattern.search(line) or "reason=" in line, (
                f"{path.name}:{number} skips without a reason"
            )


def test_readme_names_the_two_commands_first():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```(?:\w*)\n(.*?)```", text, re.S)
    assert [line.split("#")[0].strip() for line in blocks[0].strip().splitlines()][-2:] == [
        "make demo",
        "make test",
    ]
    assert text.index("make test") < text.index("conda env create")


def test_readme_names_every_module():
    tree = (ROOT / "README.md").read_text().partition("## What is where")[2]
    modules = {path.name for path in (ROOT / "swegym_tutorial").glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in (ROOT / "swegym_tutorial").glob("*/__init__.py")}
    assert not [name for name in sorted(modules | folders) if not re.search(rf"^  {name} ", tree, re.M)]


def test_make_lab_opens_a_notebook_that_is_there():
    done = subprocess.run(["make", "-n", "lab"], capture_output=True, text=True, cwd=ROOT)
    (line,) = [line for line in done.stdout.splitlines() if "jupyter lab" in line]
    command = line.split()
    assert done.returncode == 0 and (ROOT / command[-1]).is_file(), (
        "jupyter looks for it from the project's folder"
    )
    assert (ROOT / command[command.index("--notebook-dir") + 1]).is_dir()


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "swegym_tutorial", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("usage: swegym-tutorial ")
