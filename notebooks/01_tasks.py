# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Tasks: what is asked, and what judges
#
# | | |
# |---|---|
# | **Goal** | Take one task apart, run its hidden tests yourself, and know what makes a task fit for training. |
# | **You need** | Python, and a little git: what a commit and a diff are. Helpful, not needed: [00_quickstart](00_quickstart.ipynb). |
# | **Time** | 12 minutes to read; the cells take about one of them. |
# | **Cost** | None: no account, no GPU, no network. |
#
# ## The idea
#
# Somebody reports a bug. Somebody else mends it, and adds a test so that it stays mended. Every open-source project
# has thousands of such stories in its history, and each of them can become a task for an agent:
#
# - the **issue** is the question;
# - the repository as it was before the mending, the **base commit**, is where the agent starts;
# - the change that mended it, the **gold patch**, is one right answer, and the agent never sees it;
# - the tests that came with that change are the **hidden tests**: they judge the agent's answer, whatever it looks
#   like.
#
# No person has to grade anything, and no solution has to look like the gold patch. That is what makes such tasks fit
# for reinforcement learning: a reward is a test run. SWE-bench made tasks for *measuring* agents in this way, SWE-Gym
# made 2,438 of them for *training*, and this project reads SWE-Gym's form.

# %% [markdown]
# ## 1. Settings
#
# This is the one cell to change. `bundled` are 120 small tasks that come with the package, written by a program in the
# form of the real ones. With `swegym`, a sandbox of the kind `docker` or `modal` and the package's extra `swegym`, the
# same cells take a real SWE-Gym task apart. Its image has several gigabytes, so begin with `CHECKED = 1`.

# %% tags=["parameters"]
import os

SOURCE = "bundled"  # or swegym, or the path of your own JSONL file
SANDBOX = "auto"  # bubblewrap, or Docker where that can't work; or docker, modal
CHECKED = 4 if os.environ.get("SWEGYM_TUTORIAL_QUICK") == "1" else 8  # tasks that section 7 runs

# %% [markdown]
# What we need of the package. A *sandbox* is a place where commands run and can do no harm; the next notebook looks
# into it.

# %%
import dataclasses
import html
import shlex
from collections import Counter
from contextlib import closing

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display

from swegym_tutorial import TrainingConfig, grade, load_tasks
from swegym_tutorial.answers import prepare
from swegym_tutorial.exercises import check
from swegym_tutorial.grading import Bench
from swegym_tutorial.patches import apply_patch, capture_patch, touched_files
from swegym_tutorial.sandbox import backend
from swegym_tutorial.swegym_tasks import TRAINING_IDS, cached_path
from swegym_tutorial.validation import validate

config = TrainingConfig.spindle() if SOURCE.startswith("swegym") else TrainingConfig.laptop()
sandboxes = backend(SANDBOX, config, say=print)

# %% [markdown]
# ## 2. A task is a record
#
# One line of a JSONL file becomes one frozen `Task`. The names of its fields are SWE-Gym's, as attributes in lower
# case; in the file the two lists of tests are `FAIL_TO_PASS` and `PASS_TO_PASS`. (`load_tasks` gives the training
# tasks; the others are section 8's.)

# %%
tasks = load_tasks(SOURCE)
task = tasks[0]
for field in dataclasses.fields(task):
    value = getattr(task, field.name)
    text = ", ".join(value) if field.name == "files" else str(value).replace("\n", "⏎")
    print(f"{field.name:26}{text if len(text) < 75 else text[:72] + '...'}")

# %% [markdown]
# Four groups of fields: who it is (`instance_id`, `repo`, `split`), what the agent gets (`problem_statement` and the
# files at `base_commit`), what it never sees (`patch`, `test_patch` and the two lists of tests), and how the tests are
# run. The rest is kept from SWE-Gym's form.
#
# ## 3. What the agent sees
#
# It sees the issue. In the bundled tasks that is one line or a few, because a model of less than a million parameters
# has to read it; in SWE-Gym it is what a user wrote on GitHub, with tracebacks, versions and wrong guesses.
#
# And it sees the repository, in a sandbox that is opened for it alone. There is the git history up to the base commit,
# and nothing later. In a bundled task that is a single commit.

# %%
print("ISSUE\n" + task.problem_statement + "\n\nREPOSITORY")
sandbox = sandboxes.open(task)
prepare(sandbox, task, sandboxes)  # as each attempt does: it leaves nothing later than the base commit
look = "git log --oneline | head -5; echo; git ls-files | head -20; echo; cat " + touched_files(task.patch)[0]
print(sandbox.exec(look, timeout=30).output[:3000], end="")

# %% [markdown]
# ## 4. What the agent never sees
#
# First the gold patch, the maintainers' own change: green is what it adds, red what it takes away. Then the test patch,
# the tests that came with it. The agent's copy of that file has no test for the function that the issue names, so that
# the visible tests tell nothing about that one, neither before nor after a fix.


# %%
def show_diff(patch):
    """Show a diff in colours that can be read on light and dark pages."""
    colours = {"+": "#2DA44E", "-": "#E5534B", "@": "#8B949E"}
    kinds = ["" if line.startswith(("+++", "---")) else line[:1] for line in patch.splitlines()]
    lines = [(colours.get(k, "inherit"), html.escape(line)) for k, line in zip(kinds, patch.splitlines(), strict=True)]
    spans = "\n".join(f'<span style="color: {colour}">{line}</span>' for colour, line in lines)
    display(HTML(f'<pre style="font-family: monospace; line-height: 1.3">{spans}</pre>'))


show_diff(task.patch)
show_diff(task.test_patch)

# %% [markdown]
# Are the visible tests of no use, then? In every other bundled task a second function, a *twin*, has the same bug. The
# issue doesn't mention it, a visible test fails on it, and the hidden tests ask for both. The repository's own
# `check.py` runs the visible tests and shows the function that fails first. (With `-S` Python looks for no installed
# packages, and so starts sooner: the script needs none.) Here it is in our task, and in the first one with a twin,
# before any change:

# %%
if SOURCE == "bundled":
    for each in (task, next(each for each in tasks if len(each.fail_to_pass) > 1)):
        with closing(sandboxes.open(each)) as box:
            told = box.exec("python -S check.py", timeout=30).output
        print(f"{each.instance_id}\n{each.problem_statement}\n--- check.py:\n{told}")

# %% [markdown]
# An answer that lies about is an answer that will be found: a full training run makes two hundred thousand attempts,
# and reinforces whatever works. So let us search as an agent would: for an added line in the files and in all of git's
# objects, and for this package, which holds the answers of all bundled tasks.

# %%
added = [line[1:].strip() for line in task.patch.splitlines() if line.startswith("+") and line[1:2] != "+"]
needle = shlex.quote(max(added, key=len))
search = f"""grep -rnF -e {needle} . || echo "not in the files"
git cat-file --batch-all-objects --batch | grep -aF -e {needle} || echo "not in git"
python -c 'import swegym_tutorial' 2>&1 | tail -1"""
print(sandbox.exec(search, timeout=60).output, end="")
sandbox.close()

# %% [markdown]
# ## 5. Two lists of tests
#
# Whoever made the task ran the hidden tests twice, before and after the gold patch, and wrote down two lists:
#
# - `FAIL_TO_PASS`: these fail at the base commit and pass with the gold patch. They say that the bug is *mended*.
# - `PASS_TO_PASS`: these pass before and after. They say that nothing else *broke*.
#
# A patch earns a reward of 1 if **every** test of **both** lists passes, else 0. Let us check it rather than believe
# it. The recipe is short: a fresh sandbox, the patch, the hidden tests over it, and pytest's summary.


# %%
def run_hidden_tests(task, patch):
    """Return what each hidden test does with a patch: test id -> PASSED, FAILED, ..."""
    with closing(sandboxes.open(task)) as sandbox:
        for change in filter(None, (patch, task.test_patch)):
            assert apply_patch(sandbox, change.encode()).refusal is None
        command = " ".join([task.test_command, *touched_files(task.test_patch)])
        output = sandbox.exec(command, timeout=config.grading_timeout).output
    words = [line.split() for line in output.splitlines()]
    return {w[1]: w[0] for w in words if len(w) > 1 and w[0] in ("PASSED", "FAILED", "ERROR")}


# The package's own way: SWE-Gym's tasks have no test command to call by hand.
bench = Bench(sandboxes, config)
run = run_hidden_tests if task.test_command else lambda task, patch: bench.run(task, patch.encode()).tests
before, after = run(task, ""), run(task, task.patch)
for name, tests in (("FAIL_TO_PASS", task.fail_to_pass), ("PASS_TO_PASS", task.pass_to_pass)):
    for test in tests[:10]:
        print(f"{name}   {test:42} base: {before.get(test, '-'):8} gold: {after.get(test, '-')}")

# %% [markdown]
# The package's own way has more to it: it puts back what a patch did to the tests, and wants the results by two
# roads that agree, since an agent that is rewarded for green tests will learn to paint them green. The notebook on
# grading tells how. For an honest patch both ways say the same:

# %%
theirs = bench.run(task, task.patch.encode()).tests
assert all(theirs[test] == after[test] for test in (*task.fail_to_pass, *task.pass_to_pass))
grade(task, task.patch.encode(), sandboxes, config)

# %% [markdown]
# ## 6. Why the second list is there
#
# Beside each bug in the bundled tasks stands a function for which the buggy fragment is *right*. A lazy agent reads
# the issue, guesses which sign is wrong, and replaces it everywhere. (This cell is written for the first bundled task;
# another task's files don't hold these signs.) What the agent did becomes a patch, and the patch is graded.

# %%
with closing(sandboxes.open(task)) as sandbox:
    sandbox.exec("sed -i 's/ + / - /' src/cart.py", timeout=10)
    lazy = capture_patch(sandbox, task, limit=config.patch_bytes)
show_diff(lazy.decode())
grade(task, lazy, sandboxes, config)

# %% [markdown]
# In the bundled task the bug is gone, another one has come, and the reward is 0. Without `PASS_TO_PASS` this habit
# would have earned a 1, and training would have made it stronger. (And of a task with a twin, both functions' tests
# stand in `FAIL_TO_PASS`: who mends only the one that the issue names earns nothing either.)

# %% [markdown]
# ## 7. Can the tasks be trusted?
#
# A task lies if its tests pass at the base commit (then any harmless change earns 1, a new line in README say), if they
# fail with the gold patch (then nothing does), or if they sometimes pass and sometimes fail: a reward by chance is
# noise, and training has to learn through it. `validate` runs base and gold patch in fresh sandboxes, and says which
# tasks can be trusted. It takes two to five seconds a task.

# %%
found = list(validate(tasks[:CHECKED], sandboxes, config))
for validation in sorted(found, key=lambda v: v.task.instance_id):
    print(f"{validation.task.instance_id:36}{validation.status:10}{validation.why}".rstrip())

# %% [markdown]
# The same as a picture: every hidden test of these tasks, without a patch and with the gold patch.

# %%
found.sort(key=lambda validation: validation.task.instance_id)
figure, panels = plt.subplots(1, 2, figsize=(8, 1.9), sharey=True, facecolor="white", layout="constrained")
for axes, name in zip(panels, ("fail_to_pass", "pass_to_pass"), strict=True):
    for row, run in enumerate(("gold", "base")):
        told = [getattr(v, run)[test] for v in found for test in getattr(v.task, name)]
        for passed, mark, colour in ((True, "o", "#0072B2"), (False, "X", "#D55E00")):
            at = [n for n, status in enumerate(told, 1) if (status == "PASSED") == passed]
            label = ("passes" if passed else "fails") if at and axes is panels[0] else None
            axes.scatter(at, [row] * len(at), marker=mark, color=colour, s=70, label=label)
    axes.set(title=name.upper(), xlabel="hidden test", ylim=(-0.6, 1.6), xlim=(0.3, len(told) + 0.7))
    axes.set_yticks([0, 1], ["gold patch", "base commit"])
    axes.xaxis.get_major_locator().set_params(integer=True)
figure.legend(loc="outside right center", frameon=False)
plt.show()

# %% [markdown]
# **What you should see.** Left, every test is an orange cross at the base commit and a blue dot with the gold patch:
# the bugs are there, and they are mended. Right, there are blue dots only. Any other picture would be a task to leave
# out, and `swegym-tutorial tasks validate` finds these before a run does: what it calls broken or flaky is not trained
# on.
#
# ## 8. Four splits
#
# An agent that has learned 40 answers by heart looks as good as one that has learned to mend bugs, as long as one asks
# it the same 40 questions. So there are tasks that training never touches, in three sets. `held-out` has other
# repositories and other functions: no name of a function in the training tasks occurs in it. `held-out-phrasings` has
# in addition other wordings of the issues, and `held-out-families` other kinds of bugs. (An own file has held-out tasks
# where lines say so: `"split": "held-out"`, or `"held-out-..."` with a name of your own behind it.)

# %%
names = ("train", "held-out", "held-out-phrasings", "held-out-families")
splits = {name: load_tasks(SOURCE, split=name) for name in names} if SOURCE == "bundled" else {"train": tasks}
print(f"{'split':20}{'tasks':>7}{'FAIL_TO_PASS':>14}{'PASS_TO_PASS':>14}{'files a task':>14}")
for name, split in splits.items():
    mend, keep = (sum(len(getattr(t, f)) for t in split) for f in ("fail_to_pass", "pass_to_pass"))
    files = sum(len(t.files) for t in split) / max(len(split), 1)
    print(f"{name:20}{len(split):>7}{mend:>14}{keep:>14}{files:>14.1f}")
apart = [{t.repo for t in split} for split in splits.values()]
print("repositories in more than one:", sum(map(len, apart)) - len(set().union(*apart)))
print("an issue of held-out-phrasings:", *(t.problem_statement for t in splits.get(names[2], [])[:1]), sep="\n")

# %% [markdown]
# ## 9. The real thing
#
# The published run of this recipe trains on 31 tasks of SWE-Gym, from seven repositories. The record is the same; a
# container image takes the place of `files` and `test_command`, and all is larger: issues of hundreds of words, patches
# over several files, up to thousands of `PASS_TO_PASS` tests, and an image in which the repository and its environment
# stand ready.
#
# If the file of these tasks was downloaded before, the cell shows the first; it uses no network itself.

# %%
projects = Counter(name.partition("__")[2].rpartition("-")[0] for name in TRAINING_IDS)
for project, count in projects.most_common():
    print(f"{project:8} {'■' * count} {count}")
print()
if cached_path().is_file():
    real = load_tasks("swegym")[0]
    print(real.instance_id, "in", real.image)
    print("files that the gold patch touches:", *touched_files(real.patch))
    print(len(real.fail_to_pass), "tests to mend,", len(real.pass_to_pass), "to keep")
    print(real.problem_statement[:1500])
else:
    print("SWE-Gym's tasks are not on this machine. To get them, once:")
    print("    swegym-tutorial tasks list --tasks swegym")
    print("Then run this cell again, or set SOURCE to swegym in section 1.")


# %% [markdown]
# ## Summary
#
# - A task is an issue, a base commit, a gold patch and two lists of tests; the agent sees the first two.
# - The reward is 1 if all of `FAIL_TO_PASS` and all of `PASS_TO_PASS` pass. It judges what the code does, not
#   what it looks like.
# - A task is fit for training if its base fails, its gold patch passes, and both do so each time. Validate first.
# - `swegym-tutorial tasks list`, `show ID` and `validate` do all of this from a terminal.
#
# Next: [02_bash_tool](02_bash_tool.ipynb), on the place where the agent works and the one tool that it has.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.


# %% [markdown]
# **Exercise 1.** Some patch mends the bug of a task with one `FAIL_TO_PASS` and two `PASS_TO_PASS` tests, and breaks
# one of the two others. Another changes nothing at all. What are the rewards of the two?
#
# <details><summary>Solution</summary>
#
# There is no half of a point: one broken test takes the whole reward, and the untouched code fails `FAIL_TO_PASS`.
#
# ```python
# answer = [0, 0]
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # two numbers

# %% tags=["check"]
check(answer, lambda rewards: np.array_equal(rewards, [0, 0]))

# %% [markdown]
# **Exercise 2.** Be the agent: resolve the first held-out task with one bash command. Its issue says "Function
# merge_sample should return width minus speed", and the file
# is shown by `print(yours.files["src/player.py"])`. The check runs your command in a sandbox, captures the patch and
# grades it. Beware of section 6.
#
# <details><summary>Solution</summary>
#
# The plus stands twice in the file, and once rightly, so the line must be named. Any other way that mends
# only this line is as good.
#
# ```python
# yours = load_tasks(split="held-out")[0]
# answer = "sed -i 's/width + speed/width - speed/' src/player.py"
# ```
#
# </details>

# %% tags=["exercise"]
yours = load_tasks(split="held-out")[0]
answer = None  # a bash command, as a string


# %% tags=["check"]
def resolves(command):
    """Run a command as an agent would, and grade what it changed."""
    with closing(sandboxes.open(yours)) as sandbox:
        sandbox.exec(command, timeout=config.tool_timeout)
        patch = capture_patch(sandbox, yours, limit=config.patch_bytes)
    return grade(yours, patch, sandboxes, config).reward == 1


check(answer, resolves)

# %% [markdown]
# **Exercise 3.** Make a task that lies: change `bundled` below with `dataclasses.replace`, so that a patch which mends
# nothing would earn the reward. Validation should say "base already passes".
#
# <details><summary>Solution</summary>
#
# If the tests that must fail are ones that pass already, there is nothing left to mend, and any change to any file is
# rewarded.
#
# ```python
# bundled = load_tasks()[0]
# answer = dataclasses.replace(bundled, fail_to_pass=bundled.pass_to_pass)
# ```
#
# </details>

# %% tags=["exercise"]
bundled = load_tasks()[0]
answer = None  # a Task

# %% tags=["check"]
def lies(task):
    """Say whether validation finds what was asked for, or what it finds instead."""
    found = next(validate([task], sandboxes, config))
    return found.why.startswith("base already passes") or f"validation says {found.status}: {found.why}"


check(answer, lies)
