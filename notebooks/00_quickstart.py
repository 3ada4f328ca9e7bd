# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Quickstart: a coding agent learns while you watch
#
# | | |
# |---|---|
# | **Goal** | See the whole loop run once: attempts, tests, rewards, updates, and an agent that got better at bugs it had never seen. |
# | **You need** | Python and some PyTorch. No reinforcement learning. |
# | **Time** | About 15 minutes to read; the cells run in under two minutes on two cores. |
# | **Cost** | None: no account, no GPU, no network. |
#
# ## What will happen
#
# A small language model (a real Qwen3 transformer, 0.7 million parameters) gets 40 small git repositories. Each has a
# bug and an issue that says what a function should do; in every other one a second function has the same bug, and only
# the repository's own tests tell of it. The model writes bash commands, they run in an isolated sandbox, and tests that
# it never sees decide whether its change resolves the issue. What worked is made more likely, what didn't less likely.
# Before the first and after the 12th batch of attempts the model is tested on repositories that it is never trained on.
#
# Nothing here is a simulation: real tokens, real shells, real tests, real gradients through the `tinker` SDK, the
# client library of a training service, whose server runs on this machine here. The code is the one that is made for a
# 9-billion-parameter model on SWE-Gym's issues, real bugs of Python projects; there the server, the sandboxes and the
# numbers are larger.
#
# ## Three words
#
# **Agent.** A model in a loop: it reads the issue, writes a command, reads what the command printed, and so on until
# it gives an answer without a command. One such way from issue to answer is an *attempt*; its *reward* is 1 if the
# hidden tests pass, else 0.
#
# **Group.** Eight attempts at the same issue by the same version of the model. They differ only because the model draws
# its words at random, so that comparing them shows which words helped.
#
# **Advantage.** How much better an attempt did than the mean of its group, in units of the group's spread. Training
# makes each word of an attempt more likely if its advantage is positive and less likely if it is negative.

# %% [markdown]
# ## 1. Settings
#
# This is the one cell to change. The tests of this project run the notebook with `SWEGYM_TUTORIAL_QUICK=1`, which
# is enough to see that all works and too short to learn much.

# %% tags=["parameters"]
import os

QUICK = os.environ.get("SWEGYM_TUTORIAL_QUICK") == "1"
STEPS = 3 if QUICK else 12  # batches to learn from; 30 take about two minutes longer and get further
HELD_OUT_TASKS = 4 if QUICK else 20  # of each of three held-out splits, before and after
SEED = 0  # another seed, another order of tasks and other draws

# %% [markdown]
# Everything comes from one package, and each name is used below.

# %%
import time
from collections import Counter
from pathlib import Path

import numpy as np

from swegym_tutorial import Dashboard, EpisodeViewer, TrainingConfig, TrainingRun, advantages, load_tasks
from swegym_tutorial.events import EventReader, read_episode
from swegym_tutorial.exercises import check
from swegym_tutorial.habit_plot import habit_figure, habit_text
from swegym_tutorial.plots import picture
from swegym_tutorial.terminal import summarise

# %% [markdown]
# ## 2. What the agent is asked to do
#
# A task is a repository, an issue, and hidden tests. The agent sees the first two. Here is the shortest way to
# understand one: the issue, and a solution (the *gold patch*), which the agent never sees.

# %%
task = load_tasks(split="train")[0]
print("Files:", *sorted(task.files), sep="\n  ")
print("\nIssue:", task.problem_statement)
print("\nGold patch:\n" + task.patch)

# %% [markdown]
# ## 3. Start
#
# `start()` returns at once; the run goes on in the background. It starts a training server on this machine, measures
# the model as it is on the held-out issues, trains it, and measures again. Everything that happens is written to one
# folder, which is never overwritten.

# %%
config = TrainingConfig.laptop(steps=STEPS, evaluation_tasks=HELD_OUT_TASKS, evaluation_attempts=1, seed=SEED)
folder = Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
run = TrainingRun(config, folder, evaluate=True).start()

# %% [markdown]
# ## 4. Watch
#
# First comes the evaluation before training; then the figure grows by a step every few seconds. Left: the mean reward
# of all attempts that came in while a batch of groups filled. Right: where the time of a batch went. The orange
# diamonds are held-out issues, which the model is never trained on: hollow before the training, filled after it. (There
# are three kinds of them: the diamonds show the first, and the table below the figure all three.)
#
# The buttons act while the cell below waits; `dashboard.pause()`, `dashboard.resume()` and `dashboard.stop()` do the
# same from a cell. A run that was stopped is not measured after training: the sections below then show what there is.

# %%
dashboard = Dashboard(run)

# %% [markdown]
# Waiting for the dashboard waits for the run's end, and raises what the run raised. Interrupting it (the stop button
# of the notebook) stops the run: its last checkpoint stands. In a script, `run.wait()` does the same.

# %%
await dashboard

# %% [markdown]
# **What you should see.** The reward starts low and climbs from about the seventh step on. In the run of 30 steps
# whose figure stands in the [README](../README.md) it was 0.17 in the first step, 0.78 in the 12th, and 0.89 over the
# last five; yours will differ. It jumps from step to step, because a batch holds only eight of the issues. The
# held-out diamonds say the same about issues outside of the training set: the model did not just learn 40 answers by
# heart. After the first batch sampling and training take most of the time. *Tools* is the opening of sandboxes and the commands in
# them. Grading shrinks to almost nothing, because a patch that was seen before at the same issue is not tested again. A
# bar with little sampling is a batch whose attempts were nearly ready: they were made while the batch before it was
# trained on ([06_async_loop](06_async_loop.ipynb)). In the table, *stale* groups were made by weights too old to learn
# from, and *failed* ones were lost to faults; the *habits* are section 7's.

# %% [markdown]
# ## 5. Before and after
#
# Three *splits* of tasks are held out, and each asks another question. `held-out` has the kinds of bugs and the
# wordings of the training tasks, in other functions and repositories. In `held-out-phrasings` the issues are worded as
# no training issue is. In `held-out-families` the bugs are of two kinds, a wrong index and a wrong *and* or *or*, that
# no training task has. The table tells which share of the attempts passed the hidden tests.

# %%
measured = {(each.split, each.label): each for each in run.evaluations}
print(f"{'resolved':22}{'before':>8}{'after':>8}")
for split in dict.fromkeys(each.split for each in run.evaluations):
    pair = [measured.get((split, label)) for label in ("before", "after")]
    before, after = (f"{each.rate:.0%}" if each else "-" for each in pair)
    print(f"{split:22}{before:>8}{after:>8}   of {pair[0].attempts} attempts")

# %% [markdown]
# **What you should see.** All three rise, though this run has 12 batches and `make demo` 30. The third rises slowest:
# from 10 % to 30 % in the run that is kept here; after 30 batches it stood at 68 to 85 % in fourteen runs
# ([docs/world.md](../docs/world.md)). (A share of 20 attempts is sure to about ten points.) Before this run the model was
# shown by examples how to mend every kind of bug, those of the third split too. What the run teaches is *habits*, and
# they carry over: section 7 looks at them.


# %% [markdown]
# ## 6. One attempt, read closely
#
# Every attempt is kept in the run's folder: its turns, its tokens with their log-probabilities, its patch and its
# verdict. We take an issue where the first model failed and the trained one succeeded; of those, the one that took the
# most turns. (After a run that was stopped there is no such attempt: then both cells below show the first attempt of
# the training.)

# %%
def attempts(label):
    """Return the graded held-out attempts before or after training, by the names of their folders."""
    folders = sorted(folder.glob(f"episodes/evaluation-{label}/*/g*"))
    episodes = {path.name: read_episode(path) for path in folders}
    return {name: episode for name, episode in episodes.items() if "verdict" in episode}


first, trained = attempts("before"), attempts("after")
both = sorted(first.keys() & trained.keys())
turned = [n for n in both if first[n]["verdict"]["reward"] < trained[n]["verdict"]["reward"]]
print(len(turned), "of", len(both), "attempts turned from failure to success")


# %% [markdown]
# A turn is a thought and then a command or the final answer. The thoughts of this small model are one to three words
# long; which of them it chooses decides how the attempt goes on. Here is the attempt before training:

# %%
name = max(turned or both, key=lambda each: len(trained[each]["turns"]), default=None)
viewer = EpisodeViewer(folder, name and f"evaluation-before/{name}", chooser=False)

# %% [markdown]
# And the one after it, at the same issue. In a running notebook the row above it chooses any other attempt of the run;
# under *Tokens* the words are coloured by how likely the model found them when it said them. (*Policy version* counts
# the published weights; 0 is the untrained model.)

# %%
viewer = EpisodeViewer(folder, name and f"evaluation-after/{name}")

# %% [markdown]
# In the run that is kept here this is a careless edit, saved by the tests: after a look the attempt replaces every
# match in the file (hence the cross at *one line only*), which breaks a function that had no bug; the tests show
# it, and a second edit puts that line back.
#
# ## 7. Which habits it learned
#
# Five choices decide most attempts, and the first word of a thought announces each:
#
# | habit | well | badly |
# |---|---|---|
# | look before you edit | *Look first.* | *Guess the file.* |
# | don't stop before the fix | | *Fine.* (and it gives up) |
# | change one line and not every match | *Fix the line.* | *Replace all.* |
# | run the tests after an edit | *Run the tests.* | *Done.* |
# | repair what they show | *Repair that line.* | *Not mine.* |
#
# Here are the commonest ways that held-out attempts went, before and after, with how many took each:

# %%
def ways(attempts):
    """Count the ways that attempts went, as their thoughts announce them."""
    turns = (each["turns"] for each in attempts.values())
    return Counter(" ".join(turn["text"].partition("\n")[0][:20] for turn in each) for each in turns)


for label, made in (("before", first), ("after", trained)):
    print(f"{label} training:")
    for way, count in ways(made).most_common(4):
        print(f"{count:5}  {way}")

# %% [markdown]
# And here are the same habits over the training. They are read off the commands and not off the thoughts
# (`swegym_tutorial/habits.py`), so that a thought that isn't followed counts for nothing. Each point is a share of
# those attempts in which the habit came up: an attempt whose tests all pass has nothing to repair.

# %%
summary = summarise(folder)
picture(habit_figure(summary), habit_text(summary))

# %% [markdown]
# **What you should see.** Before the training most attempts guess a file and are done. The curves of looking, of naming
# the line and of running the tests rise from low places. That of changing a file at all begins in the middle, because
# most guesses name a file that does not exist; that of repairing begins high. (Few attempts of the first steps come to
# a repair, so that its curve jumps.) No reward names a habit: the reward is for resolved issues, and attempts with
# these habits earn it more often. Running the tests pays only where a second function has the bug, or where the own
# edit has broken one.

# %% [markdown]
# ## 8. Where the learning came from
#
# The log has a line for every group. Where all eight attempts earned the same there is nothing to compare, and
# the group is dropped (*uniform*); nearly all others are *kept* (not those that are stale or failed). Here is the first kept group with the advantages of its
# attempts: the rarer the success, the larger its advantage.

# %%
events = EventReader(folder).read()
groups = [e for e in events if e["event"] == "group"]
for group in [g for g in groups if g["fate"] == "kept"][:1]:
    print("rewards:   ", group["rewards"])
    print("advantages:", advantages(group["rewards"]).round(2).tolist())
print("all groups:", dict(Counter(g["fate"] for g in groups)))


# %% [markdown]
# ## Summary
#
# - An agent is a model, a tool and a loop; a reward is a test run in a sandbox that the agent can't reach.
# - Groups of attempts at one issue show what helped, without anyone writing down the right answer.
# - What is learned here are habits, and they help with issues, wordings and kinds of bugs that no training task has.
# - The run's folder tells everything: `swegym-tutorial show FOLDER` prints its steps, `Dashboard(FOLDER)`
#   shows it again on any day.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.

# %% [markdown]
# **Exercise 1.** A group of four attempts earned 1, 0, 0 and 0. Work out the four advantages by hand: subtract the
# mean, divide by the standard deviation (with n - 1). Two decimals are enough.
#
# <details><summary>Solution</summary>
#
# The mean is 0.25, the squared distances add up to 0.75, so the standard deviation is 0.5.
#
# ```python
# answer = [1.5, -0.5, -0.5, -0.5]
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a list of four numbers

# %% tags=["check"]
check(answer, advantages(np.array([1.0, 0.0, 0.0, 0.0])))

# %% [markdown]
# **Exercise 2.** Dropped groups cost time and teach nothing. What share of all groups of this run was kept? Use
# `groups` from section 8. (A run that was stopped before its first group has none to ask about.)
#
# <details><summary>Solution</summary>
#
# ```python
# answer = sum(g["fate"] == "kept" for g in groups) / len(groups)
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a number from 0 to 1

# %% tags=["check"]
check(answer, Counter(g["fate"] for g in groups)["kept"] / max(len(groups), 1))

# %% [markdown]
# **Exercise 3.** What has the model learned? Read the first thought of each held-out attempt in `first` and in
# `trained`: what share of the attempts has one that starts with `Look`? (This needs a run that was not stopped.)
#
# <details><summary>Solution</summary>
#
# ```python
# def looks(attempts):
#     return np.mean([a["turns"][0]["text"].startswith("Look") for a in attempts.values()])
#
#
# answer = [looks(first), looks(trained)]
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # two numbers from 0 to 1: before and after

# %% tags=["check"]
thoughts = [[a["turns"][0]["text"] for a in attempts.values()] for attempts in (first, trained)]
check(answer, [np.mean([text.startswith("Look") for text in texts]) for texts in thoughts])
