"""A world's files as a repository has them, and what its own checks print.

Knows nothing of git and of policies. `checked` tells what `python -S check.py` prints without starting it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .families import ROW
from .world import Function, Module, World

CHECK = "python -S check.py"
ALL_PASS = "All tests pass."
CHECK_SOURCE = '''\
"""Runs the tests without pytest, and shows the function that fails first: python -S check.py"""

import importlib
import os
import sys


def source(function):
    """Return where a function is, and its lines with their numbers."""
    path, first = os.path.relpath(function.__code__.co_filename), function.__code__.co_firstlineno
    with open(path) as file:
        lines = file.read().split("\\n")
    shown = [path, f"{first}:{lines[first - 1]}"]
    for number in range(first, len(lines)):
        if not lines[number]:
            break
        shown.append(f"{number + 1}-{lines[number]}")
    return "\\n".join(shown)


for file in sorted(os.listdir("tests")):
    if not file.startswith("test_"):
        continue
    module = importlib.import_module("tests." + file.removesuffix(".py"))
    for name, test in list(vars(module).items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
        except Exception as error:
            with open(module.__file__) as tests:
                line = tests.read().split("\\n")[error.__traceback__.tb_next.tb_lineno - 1]
            print("FAILED", line.strip())
            sys.exit(source(getattr(module, name.removeprefix("test_"))))
print("All tests pass.")
'''


def files_of(world: World, title: str) -> dict[str, str]:
    """Return path -> text at the base commit, sorted: the target has its bug and no test, a twin its bug and a test."""
    contents = [f"- `{m.path}`: {', '.join(f.name for f in m.functions)}\n" for m in world.modules]
    readme = [f"# {title}\n\n", "A small package of plain functions:\n\n", *contents]
    files = {
        ".gitignore": "__pycache__/\n.pytest_cache/\n",
        "README.md": "".join([*readme, f"\nCheck it with `{CHECK}`, or with pytest.\n"]),
        "check.py": CHECK_SOURCE,
        "src/__init__.py": "",
        **world.sources(fixed=False),
        **{m.tests_path: m.tests(left_out=world.target.name) for m in world.modules},
    }
    return dict(sorted(files.items()))


def shown_source(module: Module, function: Function, text: str) -> str:
    """Return a function as `git grep -nW --heading` and check.py show it: the path, and its lines with numbers."""
    lines = text.split("\n")
    first = module.line(function) - 1 - function.family.line
    rows = [module.path, f"{first + 1}:{lines[first]}"]
    for number in range(first + 1, len(lines)):
        if not lines[number]:
            break
        rows.append(f"{number + 1}-{lines[number]}")
    return "\n".join(rows) + "\n"


def checked(world: World, texts: Mapping[str, str]) -> tuple[Function | None, str]:
    """Return the function that fails first with these texts of the modules, None for none, and what check.py prints."""
    for module in world.modules:  # by their names, as check.py has them
        namespace: dict[str, object] = {"ROW": ROW}
        exec(texts[module.path], namespace)
        for function in module.functions:
            if function is world.target:
                continue
            for assertion in function.assertions:
                try:
                    exec(assertion, namespace)
                except Exception:
                    shown = shown_source(module, function, texts[module.path])
                    return function, f"FAILED {assertion}\n{shown}"
    return None, f"{ALL_PASS}\n"
