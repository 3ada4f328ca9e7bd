# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · The asynchronous loop: nobody waits
#
# | | |
# |---|---|
# | **Goal** | See attempts, grading and training side by side on a measured timeline, know what that costs, and stop and resume a run. |
# | **You need** | [00_quickstart](00_quickstart.ipynb) for the words, [05_minibatches](05_minibatches.ipynb) for advantages and the clip. |
# | **Time** | About 20 minutes to read; the cells run in under two minutes on two cores. |
# | **Cost** | None: no account, no GPU, no network. |
#
# ## Two ways to run a loop
#
# A training step needs a *batch*: some groups of attempts, graded. The plain way is to take turns. Make the
# attempts, then train on them, then *publish* the new weights to the part of the server that samples, and begin
# again. It is easy to reason about, and wasteful: while attempts are made the trainer sits idle, and while it
# trains no attempt is made. With eight GPUs on either side, one half of the bill is for waiting.
#
# The other way is to let each go on with its own work, and hand over results through queues. Now the next attempts
# are under way while the trainer trains. The price: they were begun by weights that are a little out of date by the
# time they are trained on. This notebook measures what it can of both. Of the gain it measures how much less the trainer
# sits idle. Time is not gained here, where sampling and training share one pair of cores: what a trainer with an accelerator
# of its own gains is worked out by a simulation (section 5), and how near this package's loop comes to the best
# possible stands in [docs/performance.md](../docs/performance.md). The price is in the log: how old is what is trained
# on (section 6).

# %% [markdown]
# ## 1. Settings
#
# Everything runs on this machine, with the settings of the quickstart. How it is with a real server:
# [07_scale_out](07_scale_out.ipynb). The tests of this project run the notebook with `SWEGYM_TUTORIAL_QUICK=1`,
# which makes smaller batches and fewer of them.

# %% tags=["parameters"]
import os

QUICK = os.environ.get("SWEGYM_TUTORIAL_QUICK") == "1"
STEPS = 2 if QUICK else 4  # batches of each run
GROUPS = 3 if QUICK else 6  # groups a batch
SEED = 0  # another seed, another order of tasks and other draws

# %% [markdown]
# `timeline` draws what went on in a run, and `read_spans` gives the same as numbers; both read the run's log and
# nothing else.

# %%
import heapq
import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from swegym_tutorial import Dashboard, TrainingConfig, TrainingRun, advantages
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.events import read_episode, scan
from swegym_tutorial.exercises import check
from swegym_tutorial.habit_plot import habit_figure, habit_text
from swegym_tutorial.halt import Halt
from swegym_tutorial.plots import picture
from swegym_tutorial.policy import PolicyService
from swegym_tutorial.sandbox import SandboxError, backend
from swegym_tutorial.server.process import LocalServer
from swegym_tutorial.terminal import summarise
from swegym_tutorial.timeline import read_spans, timeline

# %% [markdown]
# ## 2. Taking turns
#
# One setting decides which way a run goes. Each publication of weights gets a number, the *policy version*, and
# every group remembers the one that it was sampled from. `max_staleness` says how many publications older a group
# may be than the policy that is trained on it. With 0 no group may be begun before the weights are there, so that
# the run takes turns. All else is as usual: 16 attempts at once, two gradings at once.

# %%
folder = Path("runs") / time.strftime("loop-%Y%m%d-%H%M%S")
asynchronous = TrainingConfig.laptop(
    steps=STEPS, groups_per_batch=GROUPS, max_groups_per_batch=GROUPS, seed=SEED
)
synchronous = replace(asynchronous, max_staleness=0)
TrainingRun(synchronous, folder / "synchronous").start().wait()
timeline(folder / "synchronous")

# %% [markdown]
# Read it from left to right. Each bar on top is an attempt, in the colour of its policy: dark while the model writes,
# pale while its sandbox works. When the last attempt of a batch is graded, the trainer gets its turn; the black end of
# its bar, here only a hair wide, is the publication. Then all begins anew, in the next colour: no colour ever reaches over a dashed line. The
# trainer's bar has the colour of the policy that it makes; after four, colours repeat. Its hatched part is waiting.
# White gaps above are workers with nothing to do: either all groups of the batch are begun, or as many are under way as
# may be at once, which is four (`inflight_groups`).
#
# ## 3. Side by side
#
# Three *roles* make an asynchronous run. Each is one or more threads, and each knows only the queue before it and
# the one after it:
#
# | role | threads | takes | hands on |
# |---|---|---|---|
# | producer | 1 | the newest published policy | eight attempts at one task, a group |
# | attempts and graders | 16 and 2 here, 64 and 64 in the full run | an attempt; then its patch | a graded attempt; the last of a group completes it |
# | trainer | 1 | complete groups, until a batch is full | new weights: one publication a batch |
#
# The trainer takes groups in the order in which they are complete, but first those that would soon be too old. The
# producer looks at one thing only: whether a group that it starts now would find room in a batch while it is fresh
# enough. Queues have limits, so that whoever is too quick waits instead of filling the memory.
#
# The same batches again, `max_staleness` being 1, the default. This time we watch: the figure grows with each
# batch, and the table tells what the one being filled holds. To wait for the dashboard is to wait for the run, with
# buttons that act meanwhile.

# %%
run = TrainingRun(asynchronous, folder / "asynchronous").start()
dashboard = Dashboard(run)
await dashboard

# %% [markdown]
# And its timeline:

# %%
timeline(folder / "asynchronous")


# %% [markdown]
# **What you should see.** Colours now cross the dashed lines: while the trainer works on one batch, attempts of the
# next one are already made, by the policy before. Only the last batch's training is alone, because nothing follows
# it. A publication changes nothing for attempts that are under way. They end with the policy they began with, since
# a group is comparable only if all its attempts come from the same weights.
#
# ## 4. What changed, here
#
# Both runs worked through the same number of groups. How long did a batch take, how long was the trainer idle, and in
# what share of the training time were attempts made beside it?

# %%
print(f"{'':14}{'a batch':>10}{'trainer idle':>15}{'attempts beside training':>27}{'gradings at once':>19}")
lines = {name: read_spans(folder / name) for name in ("synchronous", "asynchronous")}
seconds = {name: line.steps[-1].end / len(line.steps) for name, line in lines.items()}
for name, line in lines.items():
    beside = line.overlap("rollout", "training") / line.busy("training")
    row = f"{name:14}{seconds[name]:8.1f} s{line.idle_share:15.0%}{beside:27.0%}"
    print(f"{row}{line.at_once('grading')[0]:19.1f}")
print(f"\nasynchronous / synchronous: {seconds['asynchronous'] / seconds['synchronous']:.2f} of the time")


# %% [markdown]
# **What you should see.** The trainer's idle share falls, for attempts now go on beside it. The time of a batch does not
# fall with it. Do not read much into the last number: six times that this notebook was run for keeping, it was
# 0.68, 0.85, 1.01, 1.02, 1.19 and 1.21, while the idle share fell each time, by 10 to 23 points. Here one pair of cores does
# everything. It samples tokens, runs the shells and the tests, and computes gradients, so that what is
# done *beside* training takes its time from training, which then lasts longer. Only what lay idle before could be
# gained. The last column shows some of it: no more than two gradings go on at once, and where the loop takes turns the
# graders have nothing to do at the start of each batch and while the trainer works.
#
# In a full run the trainer, the samplers and the sandboxes are different machines. Then a second of waiting is a
# second lost, and nothing is slowed down by being beside something else.
#
# ## 5. What it gains where it matters
#
# That needs no GPU to be worked out: a toy of the loop will do. Workers take attempts that last a random time, a
# batch is full when its last attempt is graded, and then the trainer is busy for a fixed time. Its one rule is the
# one about staleness: a batch may hold nothing older than `max_staleness` publications. The numbers are those of
# [docs/performance.md](../docs/performance.md): 64 workers; lognormal times with the medians given; 73 groups, of
# which 32 have mixed rewards; four minibatches of 120 + 5 s, 15 s to save and 25 s to publish. All of them are
# assumptions, not measurements.

# %%
WORKERS, ATTEMPTS, TRAINING = 64, 73 * 8, 4 * (120 + 5) + 15 + 25


def simulate(max_staleness, attempt, grading, batches=12):
    """Return when each batch was published, in simulated seconds."""
    random = np.random.default_rng(SEED)
    free, published = [0.0] * WORKERS, []  # when each worker is free; when each batch was published
    for batch in range(batches):
        oldest = batch - max_staleness  # version of the oldest policy that this batch may hold
        begin, full = published[oldest - 1] if oldest > 0 else 0.0, 0.0
        for _ in range(ATTEMPTS):
            start = max(heapq.heappop(free), begin)
            end = start + random.lognormal(np.log(attempt), 0.6)
            heapq.heappush(free, end)
            full = max(full, end + random.lognormal(np.log(grading), 0.5))
        published.append(max([full, *published[-1:]]) + TRAINING)
    return published


def pace(times):
    """Return the seconds a batch, without the first ones, which have nothing to overlap with."""
    return (times[-1] - times[3]) / (len(times) - 4)


# %% [markdown]
# No batch can be quicker than the slower side alone: the trainer, or all workers at full speed. That is the
# *bound*. We draw how far above it the toy stays, for attempts from 20 seconds to 9 minutes.

# %%
regimes = {(20, 10): "#0072B2", (45, 15): "#E69F00", (120, 90): "#009E73", (540, 90): "#CC79A7"}
figure, axes = plt.subplots(figsize=(6.4, 3.1), dpi=100, layout="constrained", facecolor="white")
found = {}
for (attempt, grading), color in regimes.items():
    bound = max(TRAINING, ATTEMPTS * attempt * np.exp(0.6**2 / 2) / WORKERS)
    found[attempt] = [pace(simulate(stale, attempt, grading)) for stale in range(4)]
    ratio = np.array(found[attempt]) / bound
    label = f"attempts of {attempt} s: {found[attempt][0]:.0f} → {found[attempt][1]:.0f} s a batch"
    axes.plot(range(4), ratio, "o-", color=color, label=label)
    assert (ratio > 0.97).all()  # nobody beats the bound, but by the luck of the draws
axes.axhline(1, color="#999999", ls="--", lw=1)
axes.set(xlabel="max_staleness", ylabel="seconds a batch / bound", xticks=range(4), ylim=(0.9, None))
axes.set_title("Simulated: one publication of staleness wins nearly all")
axes.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# **What you should see.** (The legend tells the seconds at a `max_staleness` of 0 → 1.) Taking turns costs most where attempts and training take about as long: twice the time.
# Where one side is much slower, the other hides in it anyway. And the step from 0 to 1 brings nearly everything, so
# that there is little reason to allow more.
#
# The loop of this package, put to the same numbers in compressed time, took 554 s a batch for attempts of 45 s and
# 4319 s for *eight* clients with attempts of 120 s on one trainer, which is what the trainer
# alone takes for eight, 8 · 540 s ([docs/performance.md](../docs/performance.md)). The first is less than the toy's: it
# trains on a batch's first minibatches while the last are still being collected, as it does where a batch has no limit
# on the groups that it may see (`max_groups_per_batch`), like the full run's.
#
# ## 6. How old is what is trained on?
#
# The log names the groups that each batch trained on, and the policy of each. The age is the difference. (Fewer than
# six groups: the others were uniform. A batch here closes after six groups, kept or not.)

# %%
for name, config in (("synchronous", synchronous), ("asynchronous", asynchronous)):
    events = list(scan(folder / name, ["group", "step_done"]))
    versions = {e["group"]: e["policy_version"] for e in events if e["event"] == "group"}
    for step in (e for e in events if e["event"] == "step_done"):
        ages = [step["policy_version"] - 1 - versions[group] for group in step["trained_groups"]]
        assert max(ages) <= config.max_staleness
        told = " and ".join(f"{count} of age {age}" for age, count in sorted(Counter(ages).items()))
        print(f"{name:14}policy {step['policy_version']} was trained on groups: {told}")

# %% [markdown]
# A group that is too old is *stale* and is dropped: what its attempts did says too little about the present policy.
# But dropping has a trap. Which groups are late? Those of slow tasks, which are often the hard ones. A loop that
# drops what is late unlearns to solve what takes long. So a batch here keeps room for each group that would be too
# old for the next one, and waits for it; and groups of tasks that are known to be slow start early in a policy's
# life. In a simulation with every ninth task eight times as slow, eight clients kept at worst 11 of 27 slow groups by
# dropping, and 28 of 28 by this rule ([docs/performance.md](../docs/performance.md), laptop, 8 clients).
#
# ## 7. What pays for it
#
# To train on another policy's attempts is a small mistake each time, and something has to make up for it. That is the
# *ratio* of [05_minibatches](05_minibatches.ipynb): how likely the policy finds a token now, divided by how likely it
# was when it was sampled. The loss multiplies by it, which corrects for tokens that have become more or less likely
# since; and it is clipped at 0.8 and 1.28, where a correction would get too large to be trusted.
#
# So how far does a policy move? All versions of the first run are still in its folder. We start its server again,
# and ask each version for the log-probabilities of the same tokens: those that version 0 sampled.

# %%
saved = json.loads((folder / "synchronous" / "train-job0-checkpoint.json").read_text())
paths = {each["policy_version"]: each["sampler"] for each in (saved, *saved["earlier"])}
places = sorted((folder / "synchronous").glob("episodes/*/train-job0/g*"))[: GROUPS * synchronous.group_size]
first = [read_episode(place) for place in places]
own = [np.array(each["mask"], bool) for each in first]  # where a token is the policy's own
sampled = np.concatenate([np.array(each["logprobs"])[mask] for each, mask in zip(first, own, strict=True)])
with LocalServer({synchronous.base_model: POLICY}, state_dir=folder / "synchronous" / "server") as server:
    service = PolicyService(synchronous, (server.url, server.key), Halt())
    ratios = {}
    for version in sorted(paths):
        sampler = service.sampler(paths[version])
        asked = [sampler.logprobs(np.array(each["tokens"], np.int32)) for each in first]
        now = np.concatenate([each.result()[mask] for each, mask in zip(asked, own, strict=True)])
        ratios[version] = np.exp(now - sampled)
    service.close()
assert np.allclose(ratios[0], 1, atol=0.01)  # the same policy, so the same probabilities

# %% [markdown]
# Each version is as many publications away from these attempts as its number says, and with `max_staleness` 1
# versions 0 and 1 may train on them.

# %%
ages, clips = sorted(ratios), (synchronous.clip_low, synchronous.clip_high)
outside = [np.mean((ratios[age] < clips[0]) | (ratios[age] > clips[1])) for age in ages]
band = [np.quantile(ratios[age], [0.01, 0.99]) for age in ages]
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), dpi=100, layout="constrained", facecolor="white")
left.fill_between(ages, *np.transpose(band), color="#0072B2", alpha=0.3, lw=0)
left.plot(ages, band, color="#0072B2", marker="o", ms=3)
for clip in clips:
    left.axhline(clip, color="#D55E00", ls="--", lw=1)
left.set(yscale="log", yticks=[0.6, 0.8, 1, 1.28, 1.6], yticklabels=["0.6", "0.8", "1", "1.28", "1.6"])
left.set(title="Ratios: the middle 98 %", ylabel="ratio", ylim=(0.55, 1.8))
left.minorticks_off()
bars = right.bar(ages, 100 * np.array(outside), color="#D55E00", width=0.6)
right.bar_label(bars, [f"{share:.1%}" for share in outside], fontsize=9)
right.set(title="Tokens outside of the clip", ylabel="% of tokens", ylim=(0, 130 * max(*outside, 0.002)))
for axes in (left, right):
    axes.set(xlabel="publications since sampling", xticks=ages)
plt.show()

# %% [markdown]
# **What you should see.** One publication away nearly every token lies between the clips, and the correction is
# small. It widens with each publication, and a token whose weight would push it further beyond its clip adds no
# gradient: such attempts cost as much as others and teach less. Section 5 showed that more than one publication gains
# next to nothing, so there is no reason to pay for it. (The steps of this tiny model are large, with a learning rate of
# up to 0.0013. The full run's is 0.000001.)
#
# ## 8. Pause, stop, go on
#
# A run of a day is interrupted: by you, by a deadline, by a power cut. After each batch, in the same moment as the
# publication, a run writes a *checkpoint*: the batch's number, where the server keeps weights and optimizer, which
# group comes next, and which were under way.
#
# We let the asynchronous run go on in its folder, for three more batches; `resume=True` allows that. After the first
# of them we count its threads (the trainer is the job's own, `train-job0`; *references* has work only where a KL term
# needs the base model), and then *pause* it: attempts under way end, and no new one begins. Then we *stop* it for good:
# `wait()` comes back within two seconds, the batch being filled is dropped, and the checkpoint stands.


# %%
def count(*names):
    """Return how many events of these names the log holds."""
    return sum(1 for _ in scan(folder / "asynchronous", names))


longer = replace(asynchronous, steps=STEPS + 3)
run = TrainingRun(longer, folder / "asynchronous", resume=True).start()
while count("step_done") == STEPS and not run.join(0.1):
    pass  # until one more batch is done
roles = Counter(t.name.split("-")[2] for t in threading.enumerate() if t.name.startswith("train-job0-"))
run.pause()
time.sleep(0.5)
before = count("rollout_start")
time.sleep(2)
print("threads:", dict(roles))
print("attempts begun in two seconds of pause:", count("rollout_start") - before)
run.stop()
run.wait()
saved = json.loads((folder / "asynchronous" / "train-job0-checkpoint.json").read_text())
print({name: saved[name] for name in ("step", "policy_version", "next_group", "unfinished_groups")})
assert saved["step"] >= STEPS  # counted from 0: more than before


# %% [markdown]
# The unfinished groups were under way when the checkpoint was written. They are begun anew, under the same numbers
# and so with the same tasks, and by the newest policy. No group is trained on twice, and none is lost.
#
# ## 9. A lost sandbox is no reward
#
# To go on we make it harder. Machines fail, and here every tenth sandbox does. Normally a failed attempt is tried
# again, twice on a laptop and four times in the full run; we turn that off to see what happens then.


# %%
class Flaky:
    """Opens another backend's sandboxes; every tenth one cannot be had."""

    def __init__(self, inner):
        self.inner, self.name, self.calls = inner, inner.name, itertools.count(1)
        self.missing, self.close = inner.missing, inner.close

    def open(self, task):
        if next(self.calls) % 10 == 0:
            raise SandboxError("no sandbox could be had (on purpose)")
        return self.inner.open(task)


harder = replace(longer, attempt_retries=0, steps=saved["step"] + 2)  # one more than are done
TrainingRun(harder, folder / "asynchronous", resume=True, sandboxes=Flaky(backend("auto"))).start().wait()
steps = list(scan(folder / "asynchronous", ["step_done"]))
for step in steps:
    print(f"step {step['step'] + 1}: {step['attempts']} attempts graded, {step['lost']} lost")
assert [step["step"] for step in steps] == list(range(harder.steps))
partial = [e for e in scan(folder / "asynchronous", ["group"]) if e["lost"]]
partial = max(partial, key=lambda e: e["fate"] == "kept")
print("rewards:   ", partial["rewards"], "and", partial["lost"], "lost")
print("advantages:", advantages(partial["rewards"]).round(2).tolist())

# %% [markdown]
# The steps go on where they stopped, without a gap and each once. The lost attempts have no reward, not a reward of
# 0: the model has done nothing wrong. Their groups are smaller, and the advantages are worked out among those that
# are left.
#
# Where faults become the rule (`max_fault_share` of the last `fault_window` attempts, for `fault_minutes`), the run
# stops and names the commonest. What else it survives, and how that was tried, stands in
# [docs/resilience.md](../docs/resilience.md).
#
# ## 10. What the attempts looked like meanwhile
#
# A reward tells whether attempts succeed, not how they go about it. So the log's `episode` events also hold the
# *habits* of each attempt: did it look before it edited, did it run the tests? And each `step_done` event holds how
# many of its attempts had each. Here is their share, step by step, through the stop, the resume and the lost sandboxes
# of the asynchronous run:

# %%
summary = summarise(folder / "asynchronous")
picture(habit_figure(summary), habit_text(summary))

# %% [markdown]
# **What you should see.** A point for each step, those before the stop and those after it: a stop costs the batch that
# is being filled, and nothing that was learned. So few steps are only a beginning ([00_quickstart](00_quickstart.ipynb)
# takes more of them), and each point is the share of a few dozen attempts, so that the curves jump. Such curves are
# worth a look in any run: a reward may rise for reasons that nobody wants, and what the agent does tells more than what
# it earns.
#
# ## Summary
#
# - Producer, graders and trainer are threads joined by queues, and each group carries the version of its policy.
# - Side by side pays where the sides have machines of their own, and most where they are equally fast.
# - One publication of staleness wins nearly all of it; the ratio and its clip pay for it.
# - Slow groups are waited for; lost attempts are left out; a checkpoint after each batch is what a run goes on from.
#
# [07_scale_out](07_scale_out.ipynb) puts several of these loops on one training server, and
# [08_make_it_yours](08_make_it_yours.ipynb) changes the parts.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.


# %% [markdown]
# **Exercise 1.** In the toy, let grading take 600 seconds in the median instead of 15, for attempts of 45 s.
# Workers don't wait for grading, so it costs them nothing. How many seconds does a batch take with `max_staleness`
# 0, 1 and 2?
#
# <details><summary>Solution</summary>
#
# ```python
# answer = [pace(simulate(stale, 45, 600)) for stale in (0, 1, 2)]
# ```
#
# Grading fills no worker, but a batch is not full before it is over: it is latency, and a second publication hides
# more of it.
#
# </details>

# %% tags=["exercise"]
answer = None  # three numbers

# %% tags=["check"]
check(answer, [pace(simulate(stale, 45, 600)) for stale in (0, 1, 2)], rtol=0.02)

# %% [markdown]
# **Exercise 2.** The policy is at version 7 and trains on the batch that makes version 8. `max_staleness` is 2.
# Which is the oldest version that a group of this batch may be sampled from?
#
# <details><summary>Solution</summary>
#
# A group of version 5 is two publications older than version 7.
#
# ```python
# answer = 5
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a version

# %% tags=["check"]
check(answer, 7 - 2, rtol=0.02)

# %% [markdown]
# **Exercise 3.** What share of the synchronous run's time did the trainer train or publish? Use `lines`, and add up
# the spans yourself. (`lines["synchronous"].of("training", "publishing")` returns them, each with `seconds`.)
#
# <details><summary>Solution</summary>
#
# Here no two of them overlap, so that they can be added up.
#
# ```python
# spans = lines["synchronous"].of("training", "publishing")
# answer = sum(span.seconds for span in spans) / lines["synchronous"].seconds
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a number from 0 to 1

# %% tags=["check"]
check(answer, 1 - lines["synchronous"].idle_share)
