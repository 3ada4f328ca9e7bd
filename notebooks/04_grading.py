# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Grading: what earns a reward
#
# | | |
# |---|---|
# | **Goal** | Take a patch to a verdict by hand, see every outcome that there is, cheat, and get caught. |
# | **You need** | [00_quickstart](00_quickstart.ipynb), [01_tasks](01_tasks.ipynb), git and pytest. No reinforcement learning. |
# | **Time** | About 20 minutes to read; the cells run in about a minute. |
# | **Cost** | None: no account, no GPU, no network. |
#
# ## Why this takes a notebook
#
# "Run the tests, pass or fail" sounds simple. But training searches for whatever earns the reward, with thousands of
# attempts, and a hole in the grader is often easier to find than the fix. And a grader that takes a crashed machine for a wrong
# patch teaches the model that its good patch was bad. So the grader has to answer three questions: do the hidden tests pass?
# Was it really those tests that ran? And if nothing came out, whose fault was it?

# %% [markdown]
# ## 1. Settings
#
# `auto` takes bubblewrap on this machine, or Docker where bubblewrap can't work. With `modal` and an account, the same cells run in
# the cloud.

# %% tags=["parameters"]
SANDBOX = "auto"  # or "docker", or "modal": the same cells on other sandboxes

# %% [markdown]
# A *backend* opens sandboxes. One of the bundled tasks is enough for this notebook.

# %%
from contextlib import closing
from dataclasses import replace

import matplotlib.pyplot as plt

from swegym_tutorial import TrainingConfig, grade, load_tasks
from swegym_tutorial.exercises import check
from swegym_tutorial.grading import Bench, Grader, Outcome, Verdict
from swegym_tutorial.hidden_tests import parse_pytest
from swegym_tutorial.patches import apply_patch, capture_patch
from swegym_tutorial.sandbox import SandboxError, backend
from swegym_tutorial.validation import validate
from swegym_tutorial.verdicts import wanted

config = TrainingConfig.laptop(grading_timeout=15.0)  # an endless loop is to be cut short soon
sandboxes = backend(SANDBOX)
task, other_task = load_tasks(split="train")[:2]
print("Issue:", task.problem_statement, "\n\nsrc/cart.py:\n" + task.files["src/cart.py"])


# %% [markdown]
# ## 2. All that counts is the patch
#
# The agent works in a sandbox of its own. When it is done, `capture_patch` writes down how the repository differs from its
# commit, and the sandbox is thrown away. Whatever else the agent did there, a background process, a changed Python, a
# file under `/tmp`, is gone with it.
#
# Our agent is a single shell command:

# %%
def patch_after(command, task=task):
    """Return the patch of an agent that ran one command in a sandbox of its own."""
    with closing(sandboxes.open(task)) as sandbox:
        sandbox.exec(command, timeout=config.tool_timeout)
        return capture_patch(sandbox, task, config.patch_bytes)


fix = patch_after("sed -i 's/angle + pace/angle - pace/' src/cart.py")
print(fix.decode())


# %% [markdown]
# ## 3. A verdict by hand
#
# A fresh sandbox, the patch, the *test patch* with the tests that the agent never saw, pytest, and its summary read line
# by line. Two lists belong to the task: `FAIL_TO_PASS`, the tests that the bug makes fail, and `PASS_TO_PASS`, those that worked
# before and still must. The reward is 1 if all of both pass.

# %%
def naive_reward(patch, show=False):
    """Grade a patch in the simplest way that works for honest patches."""
    with closing(sandboxes.open(task)) as sandbox:
        if apply_patch(sandbox, patch).refusal is not None:
            return 0.0
        apply_patch(sandbox, task.test_patch.encode())
        quiet = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        result = sandbox.exec(f"{task.test_command} tests/test_cart.py", timeout=60, env=quiet)
    tests = parse_pytest(result.output)
    if show:
        print(result.output, "\nread as:", tests)
    return float(all(tests.get(test) == "PASSED" for test in wanted(task)))


print("reward:", naive_reward(fix, show=True))

# %% [markdown]
# ## 4. The same by the library
#
# `grade` takes these steps and some more, which we come to. It returns a `Verdict`; a notebook shows it as a table. The `Bench`
# remembers what the tests tell on the untouched repository, so that this is found out only once.

# %%
bench = Bench(sandboxes, config)
verdict = grade(task, fix, sandboxes, config, bench)
assert verdict.reward == naive_reward(fix)
verdict

# %% [markdown]
# ## 5. The outcomes
#
# A verdict says more than 0 or 1. Here is one patch for each of the honest ways to end. Only the first earns a reward; all
# others are the agent's doing, and earn 0.

# %%
patches = {
    "the fix": fix,
    "a wrong fix": patch_after("sed -i 's/angle + pace/angle % pace/' src/cart.py"),
    "nothing changed": patch_after("true"),
    "half a patch": fix[: len(fix) // 2],
    "a syntax error": patch_after("echo 'def (' >> src/cart.py"),
    "a crash": patch_after("echo 'import ctypes; ctypes.string_at(0)' >> src/cart.py"),
    "an endless loop": patch_after("echo 'while True: pass' >> src/cart.py"),
}
verdicts = {name: grade(task, patch, sandboxes, config, bench) for name, patch in patches.items()}
for name, each in verdicts.items():
    print(f"{name:16} {each.outcome:14} reward {each.reward:.0f}  {each.detail[:48].partition(chr(10))[0]}")

# %% [markdown]
# With a syntax error the hidden tests can't even be imported, which pytest tells as an error: unresolved. The crash (a null
# pointer is read) takes pytest with it before any test has reported a result. Is that the agent's fault, or was the task broken to
# begin with? The grader runs the tests without the patch: there they do tell something, so the patch is to blame.
#
# ## 6. A cheat that works
#
# pytest runs a `conftest.py` that it finds. This one turns every result into a pass. It needs to know nothing about
# the task, and the bug stays where it is. First our grader of section 3, then the library's:

# %%
conftest = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
cheat = patch_after(f"cat > conftest.py <<'END'\n{conftest}END")
print("by hand:", naive_reward(cheat))
verdicts["conftest.py: all pass"] = grade(task, cheat, sandboxes, config, bench)
verdicts["conftest.py: all pass"]

# %% [markdown]
# Our own grader pays for it, and a policy that stumbles on this once would soon do nothing else. The library's doesn't.
# Before the tests run, `swegym_tutorial/guards.py` puts back all that decides *how* they run: the test files, `conftest.py`, `pytest.ini`,
# `pyproject.toml`, modules that stand in for pytest or Python. A file that was not there at the base commit goes away. What is
# left of the patch is its source, and the bug shows. The patch isn't punished for the file: with a fix
# beside it, it would be resolved.
#
# ## 7. A cheat in the source itself
#
# The source can't be put back, since it is what we grade. When the tests import it, it runs, in pytest's own
# process. This one writes the summary that the grader hopes for to every open file, and ends the process
# before pytest can say otherwise.

# %%
forger = f"""
import os
lines = "\\n" + "".join(f"PASSED {{test}}\\n" for test in {list(wanted(task))})
for number in range(1, 40):
    try:
        os.write(number, lines.encode())
    except OSError:
        pass
os._exit(0)
"""
patches["forged output"] = patch_after(f"cat >> src/cart.py <<'END'\n{forger}END")
verdicts["forged output"] = grade(task, patches["forged output"], sandboxes, config, bench)
print("by hand:", naive_reward(patches["forged output"]))
print("library:", verdicts["forged output"].outcome, "-", verdicts["forged output"].detail)

# %% [markdown]
# ## 8. Two ways that must agree
#
# What caught it? Results come by two ways. One is the printed summary. The other is a report that a pytest plugin
# of ours writes to a file with a random name; each line is sealed with a key that is drawn for the run. The plugin keeps it in
# memory, and deletes its file before any of the patch's code is imported. A reward needs both to say PASSED, and the report to have its end.
#
# There is a third guard. Beside the hidden tests run *canaries*, tests under random names of which some must pass and some must fail.
# Code that makes every test pass makes the wrong canary pass, too.

# %%
for name in ("the fix", "a wrong fix", "forged output"):
    run = bench.run(task, patches[name])
    print(f"{name}: report {run.channel}; canaries {'missed' if run.canary else 'as they must be'}")
    for test in wanted(task):
        printed, reported = run.printed.get(test, "-"), run.reported.get(test, "-")
        print(f"    {test:38} printed {printed:8} reported {reported}")

# %% [markdown]
# ## 9. All of them in one picture
#
# Each verdict also holds `plain`: what SWE-Gym's rules would say of the printed output alone. Left, both rewards, for each patch of
# this notebook. Right, what its verdict took.

# %%
names = list(verdicts)[::-1]
figure, (left, right) = plt.subplots(
    1, 2, figsize=(7, 3.2), dpi=100, layout="constrained", facecolor="white", sharey=True
)
for row, name in enumerate(names):
    found = verdicts[name]
    for column, earns in enumerate((found.plain is Outcome.RESOLVED, found.outcome is Outcome.RESOLVED)):
        color = "#009E73" if name == "the fix" else "#D55E00"
        left.plot(column, row, "o", ms=11, color=color, fillstyle="full" if earns else "none")
    right.text(found.seconds + 0.2, row, found.outcome, va="center", fontsize=9)
left.set(xlim=(-0.6, 1.6), title="reward 1 (filled) or 0", ylim=(-0.6, len(names) - 0.4))
left.set_xticks([0, 1], ["printed output\nalone", "this grader"])
left.set_yticks(range(len(names)), names)
seconds = [verdicts[name].seconds for name in names]
right.barh(range(len(names)), seconds, color="#56B4E9", height=0.5)
right.set(xlabel="seconds", title="outcome and time", xlim=(0, 1.5 * max(seconds)))
plt.show()

# %% [markdown]
# **What you should see.** By the printed output alone the fix and both cheats earn a reward; by this grader only the fix.
# Most verdicts take a second or two, the crash longer, since its tests then ran without the patch too, and the endless loop its
# whole time limit. A cheat that was undone takes twice as long: its
# tests ran once more with nothing put back, to find out what it would have got away with.
#
# No grader whose tests run in the same process as the code they test is safe from everything. Of 65 hostile patches in
# this project's tests 62 earn nothing here, and three that know their grader still do:
# [docs/threat-model.md](../docs/threat-model.md) tells of both.
#
# ## 10. Whose fault was it?
#
# Sandboxes fail: a machine is gone, a disk is full, an image can't be pulled. That is no verdict. `grade` raises
# `SandboxError`; a run tries again, and then leaves the attempt out and counts it. Here are two faults that are not the agent's: a backend that
# is closed, and a task whose test command doesn't exist.

# %%
closed = backend(SANDBOX)
closed.close()
broken_task = replace(task, test_command="no-such-command")
for what, where, which in (("closed", closed, task), ("broken task", sandboxes, broken_task)):
    try:
        grade(which, fix, where, config)
    except SandboxError as error:
        print(f"{what}: {error}".partition(", so")[0])
try:
    Verdict(Outcome.INFRASTRUCTURE, detail="the machine is gone").reward
except ValueError as error:
    print("reward:", error)

# %% [markdown]
# Would a 0 be so bad? The patch was the fix. Where others of its group succeeded, a 0 would make each of its tokens
# less likely; where none did, the group would be dropped and its one success lost. And where sandboxes fail more often for long attempts, say, the model would learn to give up early.
#
# ## 11. The same patch twice
#
# Many attempts at a task end in the same patch, and tests give the same result for the same bytes. A run's `Grader` finds each verdict
# once; who asks for one that is just being found waits for it.

# %%
grader = Grader(sandboxes, config, bench)
for _ in range(3):
    found = grader.grade(task, fix)
    print(found.outcome, "- known before" if found.shared else f"- found in {found.seconds:.1f} s")

# %% [markdown]
# ## 12. Can the task be trusted?
#
# A task can be broken too: a gold patch that doesn't pass, tests that already pass without it, tests that pass now and then. On
# such a task the reward is noise. `validate` runs the untouched repository and the gold patch through the same grader: the first must fail
# `FAIL_TO_PASS`, the second must be resolved. With `times=3` it finds tasks that differ from try to try.
#
# Two good tasks, and two that we break on purpose:

# %%
wrong = patches["a wrong fix"].decode()
suspects = [
    task,
    other_task,
    replace(task, instance_id="wrong-gold-patch", patch=wrong),
    replace(task, instance_id="nothing-to-mend", fail_to_pass=task.pass_to_pass),
]
for result in sorted(validate(suspects, sandboxes, config), key=lambda each: each.status):
    print(f"{result.status:8} {result.task.instance_id:24} {result.why[:75]}")


# %% [markdown]
# The command `swegym-tutorial tasks validate` does the same for whole data sets and remembers what it finds; a run leaves
# out what was found broken or flaky.
#
# ## Summary
#
# - What counts is a patch, applied in a fresh sandbox; what decides how tests run is put back first.
# - Results come by two ways that must agree, with tests beside them that must fail.
# - Only the agent's doing earns 0. A fault of the sandbox or of the task is an error, never a reward.
# - A task is trusted when its base fails and its gold patch passes, by the same grader.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.

# %% [markdown]
# **Exercise 1.** Be the agent. Print the issue and the files of `other_task` as section 1 does for `task`, and write one shell
# command that mends it.
#
# <details><summary>Solution</summary>
#
# `print(other_task.problem_statement)` asks of `pick_mass` whether one number is no smaller than another, and
# `print(other_task.files["src/route.py"])` shows `>` where it should have `>=`. The function above it has a `>` that is right.
#
# ```python
# answer = "sed -i 's/margin > scale/margin >= scale/' src/route.py"
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a shell command, as a string

# %% tags=["check"]
mended = answer and grade(other_task, patch_after(answer, other_task), sandboxes, config)
check(mended and mended.outcome, "resolved")

# %% [markdown]
# **Exercise 2.** An agent fixes the bug *and* deletes `tests/test_cart.py`, where the hidden tests will go. Which outcome is
# its verdict? Think first, then try.
#
# <details><summary>Solution</summary>
#
# The test file is put back before the tests run, and what is left is the fix. The verdict's detail tells what was undone.
#
# ```python
# answer = "resolved"
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # the name of an outcome, as a string

# %% tags=["check"]
deleted = patch_after("sed -i 's/angle + pace/angle - pace/' src/cart.py; rm tests/test_cart.py")
check(answer, grade(task, deleted, sandboxes, config, bench).outcome)

# %% [markdown]
# **Exercise 3.** The eight attempts of a group ended as resolved, infrastructure, tests_crashed, unresolved, tampered,
# infrastructure, empty_patch and resolved. What is the group's mean reward?
#
# <details><summary>Solution</summary>
#
# Two faults are left out; of the other six two were resolved.
#
# ```python
# answer = 2 / 6
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a number from 0 to 1

# %% tags=["check"]
ended = "resolved tests_crashed unresolved tampered empty_patch resolved".split()  # without the two faults
graded = [Verdict(Outcome(name)).reward for name in ended]
check(answer, sum(graded) / len(graded))
