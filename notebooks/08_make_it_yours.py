# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Make it yours: own tasks, reward, sandbox and model
#
# | | |
# |---|---|
# | **Goal** | Replace each of the four parts that a run is made of by one of your own, and train with all of them at once. |
# | **You need** | [04_grading](04_grading.ipynb), and the loop as [00_quickstart](00_quickstart.ipynb) shows it. [07_scale_out](07_scale_out.ipynb) tells of real servers. |
# | **Time** | 25 minutes to read; the cells take about a minute and a half. |
# | **Cost** | None: no account, no GPU, no network. |
#
# ## Four places to take hold of
#
# | yours | what it is | where it goes |
# |---|---|---|
# | tasks | rows of a JSONL file | `TrainingConfig(tasks="own.jsonl")` |
# | reward | a function of an attempt and its verdict | `TrainingRun(reward=...)` |
# | sandbox | an object with a name and three methods | `TrainingRun(sandboxes=...)` |
# | model | a folder that `transformers` loads, or a server that has it | `TrainingConfig(base_model=...)`, `TrainingRun(server=...)` |
#
# Nothing has to be derived from a class of ours, and nothing registered: what fits is taken.

# %% [markdown]
# ## 1. Settings
#
# The switch to a real server is `SERVER`. Any Tinker-compatible one will do; the model must then be one that it has. The key of
# a real server belongs into the environment, not into a notebook.

# %% tags=["parameters"]
import os

QUICK = os.environ.get("SWEGYM_TUTORIAL_QUICK") == "1"
STEPS = 1 if QUICK else 3  # updates of the model
SERVER = None  # our own on this machine; or ("https://...", os.environ["TINKER_API_KEY"])
SERVER_MODEL = "Qwen/Qwen3-8B"  # what SERVER is to train, by the name that it has there

# %% [markdown]
# Everything goes into one folder: the task file, the model, and the run.

# %%
import difflib
import json
import shutil
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from swegym_tutorial import Dashboard, TrainingConfig, TrainingRun, advantages, grade, load_tasks
from swegym_tutorial.bundled import POLICY, repository
from swegym_tutorial.events import EventReader
from swegym_tutorial.exercises import check
from swegym_tutorial.grading import Outcome, Verdict
from swegym_tutorial.patches import capture_patch
from swegym_tutorial.plots import picture
from swegym_tutorial.rollout import Chat
from swegym_tutorial.sandbox import SandboxError, backend
from swegym_tutorial.trust import keep
from swegym_tutorial.validation import validate

# %% [markdown]
# ## 2. Own tasks
#
# A task is a row with SWE-Gym's fields: an issue, a gold patch, a patch that brings the hidden tests, and the names of tests that
# must come to pass (`FAIL_TO_PASS`) or go on passing (`PASS_TO_PASS`). A small repository comes along as `files`; a
# large one stands in a container `image` instead.
#
# Here are the texts of a small shop. The function `{name}` will have the operator `{wrong}` where it should have `{right}`. A second
# one, for which the wrong operator is right, is there to be broken by a careless fix. The agent sees the first test; the
# two others are hidden. (The bundled model knows one kind of package: its functions have a line of docstring, and the tests run with
# `python -S check.py`. So ours are of that kind, and borrow the script; a large model needs neither.)

# %%
SOURCE = '''"""Helpers for the store."""


def read_stock({a}, {b}):
    """Combine {a} with {b}."""
    return {a} {wrong} {b}


def {name}({a}, {b}):
    """Combine {a} with {b}."""
    return {a} {operator} {b}
'''
VISIBLE = """from src.store import *


def test_read_stock():
    assert read_stock(7, 3) == 7 {wrong} 3
"""
HIDDEN = """
def test_small():
    assert {name}(7, 3) == 7 {right} 3

def test_large():
    assert {name}(12, 5) == 12 {right} 5
"""

# %% [markdown]
# `row` fills them in and makes the patches. A patch is what `diff` prints, so that Python's `difflib` can write it.


# %%
def diff(path, old, new):
    """Return the patch that makes the new text of a file from the old one."""
    lines = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(*lines, f"a/{path}", f"b/{path}"))


def row(name, a, b, wrong, right, words):
    """Return a task: a shop whose function has a wrong operator."""
    filled = {"name": name, "a": a, "b": b, "wrong": wrong, "right": right}
    bad, good = (SOURCE.format(operator=operator, **filled) for operator in (wrong, right))
    old, new = (text.format(**filled) for text in (VISIBLE, VISIBLE + HIDDEN))
    return {
        "instance_id": f"mine__{name}",
        "repo": "me/store",
        "base_commit": "",  # of no use where a task brings its files
        "problem_statement": f"Function {name} should return {a} {words} {b}.",
        "files": {"src/__init__.py": "", "src/store.py": bad, "tests/test_store.py": old, "check.py": repository.CHECK_SOURCE},
        "patch": diff("src/store.py", bad, good),
        "test_patch": diff("tests/test_store.py", old, new),
        "FAIL_TO_PASS": ["tests/test_store.py::test_small", "tests/test_store.py::test_large"],
        "PASS_TO_PASS": ["tests/test_store.py::test_read_stock"],
        "test_command": "python -m pytest -rA -q -p no:cacheprovider",
    }


# %% [markdown]
# Six of them make a task file, one JSON object a line. (Names and issues are in words that the bundled model knows; a large one
# takes any.) `load_tasks` reads it, and names line and field where something is missing.

# %%
rows = [
    row("get_order", "weight", "factor", "+", "%", "modulo"),
    row("find_level", "height", "margin", "-", "+", "plus"),
    row("make_rate", "room", "angle", "%", "-", "minus"),
    row("check_score", "budget", "limit", "-", "%", "modulo"),
    row("merge_cost", "width", "scale", "%", "+", "plus"),
    row("apply_speed", "price", "delay", "+", "-", "minus"),
]
home = Path("runs") / time.strftime("mine-%Y%m%d-%H%M%S")
home.mkdir(parents=True)


def saved(name, rows):
    """Write rows into a task file, and read it back."""
    (home / name).write_text("".join(json.dumps(each) + "\n" for each in rows))
    return load_tasks(home / name)


tasks = saved("own.jsonl", rows)
print(tasks[0].problem_statement, "\n\n" + tasks[0].patch)

# %% [markdown]
# Own tasks are wrong more often than one thinks: a test that passes already, a gold patch that misses a case. Training on such a task is training
# on noise. `validate` runs base and gold patch through the grader ([04_grading](04_grading.ipynb) tells how), and finds the one
# that we spoil: its tests ask for the bug.

# %%
config = TrainingConfig.laptop()
sandboxes = backend(config.sandbox, config, say=print)
spoiled = {**rows[0], "instance_id": "mine__spoiled", "test_patch": rows[0]["test_patch"].replace("%", "+")}
found = list(validate([*tasks, *saved("spoiled.jsonl", [spoiled])], sandboxes, config))
for each in sorted(found, key=lambda each: each.task.instance_id):
    print(f"{each.task.instance_id:20}{each.status:8}{each.why.partition(',')[0]}")
    keep(each, sandboxes.name, print)  # as `tasks validate` does: runs leave out what is known to be broken


# %% [markdown]
# ## 3. Own sandbox
#
# A *backend* has a name and three methods: `open` gives a sandbox for a task, `missing` tells which tasks it couldn't open, and
# `close` ends all. A sandbox runs commands, and reads and writes files. The easiest way to an own one is to stand in front of
# another. Ours keeps a diary of the commands, and fails on purpose at every thirteenth `open`, with the one error that means
# *the sandbox's fault*, `SandboxError`. A run calls a backend from many threads at once; that is why lists are appended to here, which
# Python does in one piece; a race may shift which `open` fails, and that doesn't matter here. The methods and their arguments are
# `SandboxBackend` and `Sandbox` in `swegym_tutorial.sandbox`, and `exec` returns a `CommandResult`. Any exception but `SandboxError`
# ends the run, so turn your service's own errors into it.


# %%
class Watched:
    """Sandboxes of another backend, with a diary of what ran in them, and a fault now and then."""

    def __init__(self, inner, fault_every):
        self.name, self.inner, self.fault_every = f"watched-{inner.name}", inner, fault_every
        self.asked, self.diary = [], []
        self.missing, self.close = inner.missing, inner.close

    def open(self, task):
        self.asked.append(task.instance_id)
        if len(self.asked) % self.fault_every == 0:
            raise SandboxError("a fault on purpose")
        return WatchedSandbox(self.inner.open(task), self.diary)


class WatchedSandbox:
    def __init__(self, inner, diary):
        self.inner, self.diary = inner, diary
        self.write_file, self.read_file, self.close = inner.write_file, inner.read_file, inner.close

    def exec(self, command, **limits):
        result = self.inner.exec(command, **limits)
        self.diary.append((command, result))
        return result


# %% [markdown]
# Tried by hand: we open the first task in it, look around, and run the tests that the agent can see. (What a notebook opens and doesn't
# close ends with its kernel.)

# %%
watched = Watched(sandboxes, fault_every=13)
with closing(watched.open(tasks[0])) as sandbox:
    sandbox.exec("git log --oneline; tail -3 src/store.py", timeout=10)
    sandbox.exec("python -m pytest -q --no-header | tail -1", timeout=60)
for command, result in watched.diary:
    print(f"$ {command}\n{result.output}")

# %% [markdown]
# ## 4. Own reward
#
# A reward of 1 or 0 is honest and sparse: where no attempt of a group succeeds, all earn the same, and the group teaches
# nothing. So people give *partial credit*. A reward is any function of the task, the attempt and its verdict that
# returns a number between 0 and 1. (Another scale would change nothing: advantages are in units of the group's spread. A number outside of 0 to 1, or an
# exception, ends the run at the first attempt that is graded.)
#
# Ours gives up to half a reward where the issue is not resolved: by the share of `FAIL_TO_PASS` that passes. Note the
# first line. It gives nothing of its own where the verdict is anything but *unresolved*: what a
# tampered run's tests say is exactly what can't be believed.


# %%
def partial_credit(task, rollout, verdict):
    """Return 1 for a resolved issue, and up to 1/2 for hidden tests that pass while others don't."""
    if verdict.outcome is not Outcome.UNRESOLVED:
        return verdict.reward
    passed = [verdict.tests.get(test) == "PASSED" for test in task.fail_to_pass]
    return 0.5 * sum(passed) / len(passed)


def verdict_after(command, task=tasks[0]):
    """Return the verdict on what one command leaves behind."""
    with closing(sandboxes.open(task)) as sandbox:
        sandbox.exec(command, timeout=10)
        return grade(task, capture_patch(sandbox, task, config.patch_bytes), sandboxes, config)


for command in (
    "sed -i '11s/ + / % /' src/store.py",
    "sed -i 's/+/%/' src/store.py",
    "sed -i 's/+/-/' src/store.py",
    "true",
):
    verdict = verdict_after(command)
    earned = partial_credit(tasks[0], None, verdict)
    print(f"{command:36}{verdict.outcome:13} reward {verdict.reward:.0f}  with partial credit {earned}")

# %% [markdown]
# The second command replaces the operator in the whole file: the issue is solved, and the neighbour broken. Is that half as good as a
# fix? **Whatever you pay for, you will get.** A policy that finds the half reward easy and the whole one hard may settle for
# the half; exercise 2 shows a reward that pays for nothing at all. Three habits help: keep partial credit well below the
# real thing; look at attempts with high rewards ([03_rollouts](03_rollouts.ipynb) shows the viewer); and judge a run by what it
# resolves, not by what it earns. Evaluations do that: they never ask the own reward.
#
# Nor is it asked about an infrastructure fault. There is no verdict then, and nothing that could be worth 0.
#
# ## 5. Own model
#
# For the local server a model is a folder: `config.json`, weights, and a tokenizer whose chat template knows tools.
# Ours is the bundled one with a *warm start*: a few steps of ordinary supervised training, in plain PyTorch, so that it begins more attempts
# by looking. Large models are prepared in the same way, with demonstrations, before reinforcement learning takes over:
# what a policy never does by itself, it can't be rewarded for.

# %%
model, tokenizer = AutoModelForCausalLM.from_pretrained(POLICY), AutoTokenizer.from_pretrained(POLICY)
chat = Chat(tokenizer, config.system_prompt)
lessons = [torch.tensor([chat.prompt(each) + chat.encode("Look")]) for each in tasks]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
likely = []
for step in range(13):
    losses = [-model(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]] for ids in lessons]
    likely.append(torch.exp(-torch.stack(losses)).mean().item())
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    optimizer.step()
print("chance that an attempt begins with Look:", *(f"{chance:.2f}" for chance in likely[::4]))
folder = shutil.copytree(POLICY, home / "looker")
model.save_pretrained(folder)

# %% [markdown]
# The same folder can be served to any `tinker` client, in a terminal: `swegym-tutorial serve --model FOLDER --name looker`
# prints the URL and the key. A model of another make needs nothing else, as long as it takes a system message and tools; the tokenizer
# is the one in the folder, or whatever `TrainingConfig(tokenizer=...)` names.
#
# ## 6. All four at once
#
# The settings name the task file and the model, the run gets the sandboxes and the reward. (It closes the sandboxes that it was
# given, so it gets its own.) A batch is four tasks, with eight
# attempts each. With a real server the limits are those of the preset for large models, which has room for long turns. (At the command
# line, tasks and model are `--tasks FILE` and `--base-model FOLDER`.)

# %%
base = str(folder) if SERVER is None else SERVER_MODEL
preset = TrainingConfig.laptop if SERVER is None else TrainingConfig.spindle
size = {"clients": 1, "steps": STEPS, "groups_per_batch": 4, "max_groups_per_batch": 4}
own = {"tasks": str(home / "own.jsonl"), "base_model": base, "tokenizer": None, "tokenizer_revision": None}
watched = Watched(backend(config.sandbox, config), fault_every=13)
settings = preset(**size, **own)
run = TrainingRun(settings, home / "run", sandboxes=watched, reward=partial_credit, server=SERVER).start()
dashboard = Dashboard(run)

# %% [markdown]
# Waiting for the dashboard waits for the run, and raises what the run raised.

# %%
await dashboard

# %% [markdown]
# The sandbox failed again and again, and the log tells of it. A fault is tried again, twice; an attempt that has three in a row is
# left out of its group, and is no 0. The diary knows what the agent likes to do. And since the mean reward of this run is the
# own one, we count what was resolved, too.

# %%
events = EventReader(home / "run").read()
episodes = [event for event in events if event["event"] == "episode"]
lost = sum(event["reward"] is None for event in episodes)
faults = sum(event["event"] == "attempt_fault" for event in events)
print(f"{len(watched.asked)} sandboxes asked for, {faults} faults, {lost} of {len(episodes)} attempts lost")
used = Counter(command.split()[0] for command, _ in watched.diary)
print("the agent's commands:", {name: used[name] for name in ("git", "sed", "python")})
thirds = np.array_split([event["outcome"] == "resolved" for event in episodes if event["reward"] is not None], 3)
print("resolved, of each third of the attempts:", *(f"{third.mean():.0%}" for third in thirds))

# %% [markdown]
# ## 7. What the own reward did
#
# Which attempts earned a half, and what did that make of them? For each of them, the advantage that the plain reward would
# have given it within its group, and the one that it had. Above 0 training makes an attempt more likely, below 0 less.

# %%
groups, halves = {}, []
for event in episodes:
    if event["reward"] is not None:
        groups.setdefault(event["group"], []).append(event)
for group in groups.values():
    own = advantages([event["reward"] for event in group])
    plain = advantages([event["outcome"] == "resolved" for event in group])
    halves += [(p, o) for p, o, e in zip(plain, own, group, strict=True) if 0 < e["reward"] < 1]
figure = Figure(figsize=(8, 3), layout="constrained", facecolor="white")
axes, halves = figure.subplots(), np.array(sorted(halves)).reshape(-1, 2)
places = range(len(halves))
axes.vlines(places, halves[:, 0], halves[:, 1], color="#BBBBBB")
axes.plot(places, halves[:, 0], "o", color="#0072B2", ms=10, mfc="none", label="by the plain reward")
axes.plot(places, halves[:, 1], "s", color="#D55E00", label="by the own reward")
axes.axhline(0, color="#444444", lw=0.8)
axes.set(xlabel="attempts that earned a half", ylabel="advantage", xticks=[])
axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
taught = (halves[:, 1] > 0).sum()
print(f"{len(halves)} attempts earned a half; the own reward makes {taught} of them more likely")
picture(figure, f"Two advantages each of {len(halves)} attempts; {taught} lie above 0 by the own reward.")

# %% [markdown]
# **What you should see.** The circles lie below 0: by the plain reward, a fix that breaks its neighbour becomes less likely. Most squares
# lie higher, and some above 0: where most of a group does nothing, a careless fix is better than the mean, and so it *is
# taught*. That is what partial credit does. As a bridge it is right, where whole successes are too rare to be found; once they
# are not, it must go.
#
# Two cases stand out, where there are any. A circle on 0 belongs to a group that nobody solved: there the plain reward teaches nothing, and the own one the
# careless fix. And where circle and square coincide, all of the group earned 1/2 or 1, which to advantages is the same as 0 or 1.
# A square on 0 earned just its group's mean.
# (Each run draws anew, so that your numbers will differ.)

# %% [markdown]
# ## Summary
#
# - A task is a JSON row; `validate` tells whether it can be trusted, and should always be asked.
# - A reward is a function of task, attempt and verdict. It is paid for in behaviour: reward what you want, and measure what is resolved.
# - A sandbox is whatever has the methods; a `SandboxError` says that it was not the agent's doing.
# - A model is a folder, or a name that your server knows. A warm start decides what reinforcement learning can find.
#
# That was the last notebook. What remains is to use it: `swegym-tutorial train --help` tells all of it at the command line.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.
#
# **Exercise 1.** Write a reward that likes short work: 1 for an attempt that resolves the issue in at most three turns, 0.8
# for one that does so in more, and 0 for everything else. (An attempt's turns are `rollout.turns`.)
#
# <details><summary>Solution</summary>
#
# ```python
# def answer(task, rollout, verdict):
#     return verdict.reward * (1.0 if len(rollout.turns) <= 3 else 0.8)
# ```
#
# Note what it would teach: *look*, *fix* and *done* are three turns, and running the tests is a fourth.
#
# </details>

# %% tags=["exercise"]
answer = None  # a function of task, rollout and verdict


# %% tags=["check"]
def likes_short_work(reward):
    """Ask it about two resolved attempts and three that failed."""
    cases = ((3, "resolved", 1), (4, "resolved", 0.8), (2, "unresolved", 0), (2, "tampered", 0), (1, "empty_patch", 0))
    made = [(SimpleNamespace(turns=(None,) * n), Verdict(Outcome(name)), worth) for n, name, worth in cases]
    return all(np.isclose(reward(tasks[0], rollout, verdict), worth) for rollout, verdict, worth in made)


check(answer, likes_short_work)

# %% [markdown]
# **Exercise 2.** A colleague's reward is the share of a task's tests that pass, whatever the outcome. Write one shell command whose patch mends nothing in
# `tasks[0]` and still earns a third.
#
# <details><summary>Solution</summary>
#
# One of three tests passed from the beginning. It only takes a patch that is not empty; a policy would find that within a few
# steps, and have no reason to stop.
#
# ```python
# answer = "echo '# looks good' >> src/store.py"
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a shell command


# %% tags=["check"]
def pays_for_nothing(command):
    """Grade what it leaves, and pay as the colleague does."""
    verdict = verdict_after(command)
    share = sum(status == "PASSED" for status in verdict.tests.values()) / max(1, len(verdict.tests))
    return verdict.outcome is Outcome.UNRESOLVED and 0.3 < share < 0.4


check(answer, pays_for_nothing)

# %% [markdown]
# **Exercise 3.** Write a task of your own, as a row, under a name that the six don't have. It must be valid.
#
# <details><summary>Solution</summary>
#
# ```python
# answer = row("adjust_offset", "length", "depth", "+", "-", "minus")
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a dict, as row() makes one


# %% tags=["check"]
def is_a_valid_task(answer):
    """Read it as a row of a file, and validate it."""
    if not isinstance(answer, dict) or answer["instance_id"] in {each["instance_id"] for each in rows}:
        return "it must be a row, under a name that the six don't have"
    return next(validate(saved("answer.jsonl", [answer]), sandboxes, config)).valid


check(answer, is_a_valid_task)
