# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · Scale out: one trainer, many clients
#
# | | |
# |---|---|
# | **Goal** | Know what the full run changes, check a server before you pay for it, watch two clients share one, and work out what a run of eight takes. |
# | **You need** | [06_async_loop](06_async_loop.ipynb). For the full run, later: a Modal account, and a Tinker-compatible server. |
# | **Time** | About 20 minutes to read; the cells run in one to two minutes. |
# | **Cost** | None as it stands: no account, no GPU, no network. With `REAL = True` your own server and account are used, and billed. |
#
# ## From a laptop to many GPUs
#
# So far the model had less than a million parameters and everything ran here. The published run trains a model of 9
# billion on real issues, in three places: a *training server* with the GPUs, which both samples and trains;
# *sandboxes* in the cloud, hundreds at a time; and the *driver*, the process that you start, which needs no GPU and
# only joins the two.
#
# The server speaks the protocol of the `tinker` SDK. [Spindle](https://github.com/modal-projects/spindle) is one
# that you deploy on Modal, and the small server that this package starts on your machine is another. So nothing in
# the code changes: the cells below run on the local one, and with one word changed on the real one.

# %% [markdown]
# ## 1. Settings
#
# With `REAL = True` the cells use the server that `TINKER_BASE_URL` and `TINKER_API_KEY` name, Modal's sandboxes
# and SWE-Gym's issues; README tells how to set them up ("The full run"). The run is then as small as can be: one
# step, one group. Prices are for section 8: yours, in your currency. As long as they are `None`, amounts are told
# instead of money.

# %% tags=["parameters"]
import os

REAL = False  # True: your server and your account, and their prices
CLIENTS = 2
QUICK = os.environ.get("SWEGYM_TUTORIAL_QUICK") == "1"
STEPS, GROUPS = (2, 3) if QUICK else (3, 8)  # batches of each client, and groups a batch, offline
GPU_HOUR = CORE_HOUR = GIB_HOUR = None  # prices: a GPU; a sandbox's core, its GiB

# %% [markdown]
# Most of these names are what a run uses itself before it begins.

# %%
import io
import json
import re
import subprocess
import time
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from swegym_tutorial import Dashboard, TrainingConfig, TrainingRun, load_tasks
from swegym_tutorial.batches import task_at
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.connect import first_client, server_from_environment
from swegym_tutorial.doctor import report
from swegym_tutorial.exercises import check
from swegym_tutorial.halt import Halt
from swegym_tutorial.policy import PolicyService
from swegym_tutorial.preflight import PreflightError, check_address, check_training
from swegym_tutorial.sandbox import backend
from swegym_tutorial.server.process import LocalServer
from swegym_tutorial.swegym_tasks import TRAINING_IDS, image_of
from swegym_tutorial.timeline import read_spans, timeline

# %% [markdown]
# ## 2. Two presets
#
# A preset is a `TrainingConfig` with other numbers, and nothing else: there is no second code path for the full
# run. Here is all in which the two differ.

# %%
laptop, spindle = TrainingConfig.laptop().to_json(), TrainingConfig.spindle().to_json()
different = [name for name in laptop if laptop[name] != spindle[name]]
print(f"{'':22}{'laptop':>30}{'spindle':>30}")
for name in different:
    print(f"{name:22}{str(laptop[name])[:27]:>30}{str(spindle[name])[:27]:>30}")
print("\nthe same in both:", len(laptop) - len(different), "of", len(laptop))
print(f"\nthe {len(TRAINING_IDS)} issues; the first one's image: {image_of(TRAINING_IDS[0])}")
for repository in dict.fromkeys(each.rpartition("-")[0] for each in TRAINING_IDS):
    print(f"{repository:26}", *(i.rpartition("-")[2] for i in TRAINING_IDS if i.startswith(repository)))

# %% [markdown]
# Read it in three parts. *What*: another model, 31 issues of SWE-Gym instead of bundled ones, a context of 128
# thousand tokens instead of one. (`getmoto__moto-7023` is the issue that pull request 7023 of `getmoto/moto` mended;
# each has a container image with all that its repository needs.) *How much*: batches of 32 groups, of which only those
# with mixed rewards count (`max_groups_per_batch` is none), a hundred steps, eight clients. *How careful*: a learning
# rate a thousand times smaller, a KL term ([05_minibatches](05_minibatches.ipynb)), more retries and more patience,
# because a machine on the other side of a network fails more often.
#
# From here on `config` is the one that you chose in section 1.

# %%
if REAL:  # the smallest run there is: one group, tried until one has mixed rewards
    small = {"steps": 1, "groups_per_batch": 1, "max_fruitless_groups": 20}
    config = TrainingConfig.spindle(clients=CLIENTS, **small)
else:
    sizes = {"groups_per_batch": GROUPS, "max_groups_per_batch": GROUPS}
    config = TrainingConfig.laptop(clients=CLIENTS, steps=STEPS, **sizes)
folder = Path("runs") / time.strftime("clients-%Y%m%d-%H%M%S")
told = io.StringIO()
with redirect_stdout(told):
    report()
for line in told.getvalue().splitlines():
    line = re.sub(r"((?<![:/\w])|unix:)/[\w/.]+", "…", line)
    print(line if len(line) < 96 else f"{line[:95]}…")

# %% [markdown]
# This was the *doctor*, here with long lines cut and this machine's paths left out. In a terminal it is
# `swegym-tutorial doctor`. It tries things instead of guessing: it opens a sandbox, starts a server, asks Docker
# and Modal. Each "no" comes with its mend, which is mostly cut here.
#
# ## 3. Preflight: before the first dollar
#
# Tinker-compatible servers differ, and a lack that shows after an hour is a lost hour. So before a run opens its
# first sandbox, it tries on the first client's own adapter all that it will need:
#
# | check | what would go wrong without it |
# |---|---|
# | the address, the key, the model's name | nothing works; each has its own message |
# | a LoRA adapter and its tokenizer | tokens are made on this side: with another tokenizer all of them would be wrong |
# | publishing | there is one publication a batch |
# | sampling with log-probabilities | the ratio of the loss needs those of the moment of sampling |
# | log-probabilities of the base model | the KL term needs them, if `kl_coef` isn't 0 |
# | the `ppo` loss, with advantages of 0 | all batches end there; with zeros no weight is changed |
#
# We run it as a run does, and then break what can be broken.


# %%
def timed(what, call, *args):
    began = time.monotonic()
    result = call(*args)
    print(f"{what:44}{time.monotonic() - began:6.2f} s")
    return result


with ExitStack() as stack:
    if not REAL:
        models, state = {config.base_model: POLICY}, folder.with_suffix(".preflight")
        server = stack.enter_context(LocalServer(models, state_dir=state))
    url, key = server_from_environment(config) or (server.url, server.key)
    service = stack.enter_context(closing(PolicyService(config, (url, key), Halt())))
    timed("address, key and model", check_address, url, key, config.base_model)
    client, chat = timed("adapter and tokenizer", first_client, service, config)
    everything = service, client, replace(config, kl_coef=1e-4), chat.encode("Hello"), "preflight"
    timed("publish, sample, base model, loss", check_training, *everything)
    for wrong in (("http://127.0.0.1:9", key), (url, "tml-guessed"), (url, key)):
        try:
            check_address(*wrong, "gpt-2" if wrong == (url, key) else config.base_model)
        except PreflightError as error:
            print(f"\n{error}")

# %% [markdown]
# `swegym-tutorial train --smoke-test` does the first half of this from a terminal: one adapter, four tokens. A
# server that is asleep may take minutes for the first answer. The checks wait for one that starts, and not for one
# that isn't there.
#
# ## 4. Who knows the secrets
#
# The driver needs a key for the server and a token for Modal. The agent needs neither, and code written by a model
# must not be able to read them. A sandbox gets no variable of the driver's, none of its files, and no network. Try
# it: we put a secret into a variable and into a file, and search for it, from the driver's side and from a sandbox.

# %%
secret, place = "tml-do-not-tell", folder.with_suffix(".secret").resolve()
os.environ["A_SECRET"] = secret
place.parent.mkdir(exist_ok=True)
place.write_text(secret)
search = f"env; cat /proc/*/environ '{place}'; python -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)'"
with closing(backend(config.sandbox, config)) as sandboxes:
    found = sandboxes.open(load_tasks(config.tasks)[0]).exec(search, timeout=30).output
outside = subprocess.run(["bash", "-c", f"env; cat '{place}'"], capture_output=True, text=True).stdout
del os.environ["A_SECRET"]
place.unlink()
print("times found by a command of the driver:", outside.count(secret))
print("times found by a command in a sandbox: ", found.count(secret))
print("the network:", found.strip().splitlines()[-1])
assert outside.count(secret) == 2 and secret not in found and "Error" in found

# %% [markdown]
# ## 5. Two clients, one trainer
#
# Why more than one client? A trainer that serves one client waits whenever attempts take longer than training. A
# *client* is one whole loop: its own adapter, order of tasks, policy versions and checkpoints. What they share is
# the large part: the frozen base model in the GPUs' memory. That is called *multi-LoRA*. A
# second client uses the time in which the trainer would wait: for another seed, say, to know whether a result was luck. Once the
# trainer is full, each further one makes all of them slower (section 7). What further clients never cost much is memory.
#
# One thin line a client, and their mean in bold:

# %%
run = TrainingRun(config, folder).start()
dashboard = Dashboard(run)
await dashboard

# %% [markdown]
# **What you should see.** Two thin lines that differ, because each client drew other tasks, and the mean between
# them, after so few steps still near where it began. Now the same run as lanes. The trainer has one row for each
# client:

# %%
together = read_spans(folder)
for job in together.jobs:
    share = read_spans(folder, job).busy("training") / together.seconds
    print(f"{job} keeps the trainer busy for {share:.0%} of the time")
print(f"both together:                   {together.busy('training'):.1f} of {together.seconds:.1f} s")
timeline(folder)

# %% [markdown]
# Colours tell the clients apart, and the trainer has a row for each. Where bars of the two rows overlap, if they
# do, both have work at the trainer, which takes it in turn; meanwhile the attempts of both go on. The seconds of two clients
# on one small CPU say little about GPUs, but the order of things is the same: who waits for whom.
#
# ## 6. What each client has of its own
#
# The seed of a run, the client's number and the group's number decide which task a group gets, and with the
# attempt's number how it is sampled. So clients see the tasks in different orders, and a resumed one goes on in its
# own.
#
# The adapter is two thin matrices beside each weight matrix: of rank $r$, for one with $a$ inputs and $b$ outputs,
# $r(a + b)$ numbers instead of $ab$. We count them, and compare with the file that the server published.

# %%
tasks = load_tasks(config.tasks, split="train")
for job in range(CLIENTS):
    print(f"client {job}:", *(task_at(tasks, config.seed, job, n).instance_id for n in range(3)), "...")
shape = json.loads((POLICY / "config.json").read_text())
hidden, inner, layers = map(shape.get, ("hidden_size", "intermediate_size", "num_hidden_layers"))
query, keys = (shape["head_dim"] * shape[f"num_{name}_heads"] for name in ("attention", "key_value"))
matrices = [(hidden, query), (hidden, keys), (hidden, keys), (query, hidden)]
matrices += [(hidden, inner), (hidden, inner), (inner, hidden)]
adapter = laptop["lora_rank"] * layers * sum(a + b for a, b in matrices)
base = (POLICY / "model.safetensors").stat().st_size // 4  # four bytes a number
print(f"\nshared: the model, of {base / 1e3:.0f} thousand numbers")
print(f"for each client: an adapter, of {adapter / 1e3:.0f} thousand")
files = list(folder.glob("server/*/sampler_weights/run-*"))  # of the local server
print(f"published: {len(files)} files of", {round(file.stat().st_size / 4e3) for file in files}, "thousand")
assert REAL or (files and all(abs(file.stat().st_size - 4 * adapter) < 10_000 for file in files))

# %% [markdown]
# Of a tiny model that is almost a fifth. In large models the matrices grow with the square of the width and adapters only
# with the width itself, so that the share shrinks. For training an adapter needs four numbers for each of its own:
# the weight, its gradient and Adam's two averages. The frozen base needs one. That is why a further client costs so
# little memory.
#
# ## 7. How many clients keep a trainer busy?
#
# A client's batch takes the trainer a time $T$, and its own workers a time $R$ to make the attempts. With $n$ clients
# that go on side by side, the trainer is busy for $nT$ of every $\max(nT, R)$ seconds. The curves are that formula,
# with the numbers of notebook 06. The dots come from the real loop between a trainer and sandboxes that only sleep, in
# compressed time ([docs/performance.md](../docs/performance.md)). The crosses are what Spindle's authors published, of
# a run whose times we don't know.

# %%
TRAINER = 4 * (120 + 5) + 15 + 25  # seconds of the trainer for one batch of one client


def rollouts(attempt, kept=0.44):
    """Return the seconds in which 64 workers make a batch: 32 kept groups of 8 attempts."""
    return 32 / kept * 8 * attempt * np.exp(0.6**2 / 2) / 64


def busy(clients, attempt):
    return clients * TRAINER / max(clients * TRAINER, rollouts(attempt))


# %% [markdown]
# The figure asserts that formula and measurement differ by less than 5 of 100.

# %%
COLORS = {45: "#E69F00", 120: "#009E73", 540: "#CC79A7"}
MEASURED = ((1, 45, 0.98), (8, 120, 1.0), (1, 540, 0.09))  # clients, attempt, share; docs/performance.md
figure, axes = plt.subplots(figsize=(6.4, 3.1), dpi=100, layout="constrained", facecolor="white")
for attempt, color in COLORS.items():
    shares = [busy(clients, attempt) for clients in range(1, 13)]
    axes.plot(range(1, 13), shares, ".-", color=color, label=f"attempts of {attempt} s")
for clients, attempt, share in MEASURED:
    axes.plot(clients, share, "o", color=COLORS[attempt], ms=8)
    assert abs(busy(clients, attempt) - share) < 0.05
axes.plot([1, 8], [0.579, 0.843], "x", color="#222222", ms=8, mew=2, label="published by Spindle")
axes.set(
    xlabel="clients on one trainer",
    ylabel="share of time busy",
    ylim=(0, 1.05),
    title="How busy a trainer is",
)
axes.legend(frameon=False, fontsize=9, loc="lower right")
plt.show()

# %% [markdown]
# **What you should see.** The longer the attempts, the more clients a trainer can serve before it is full, and a
# full trainer is what you pay for. Eight clients fill it for attempts of up to six and a half minutes (8 · 540 / 10.9
# seconds, by the formula). Clients beyond
# that spoil nothing; each of them only takes longer.
#
# ## 8. What would it take?
#
# Nobody can tell you without your own numbers. But the formula is short, and your first step, of one client,
# measures what goes into it. Here it is with the *assumed* times of above: attempts of 120 s, gradings of 90 s.
# GPUs are 8 for the trainer and 8 for sampling, as published.

# %%
full = TrainingConfig.spindle()


def estimate(attempt=120, grading=90, kept=0.44, gpus=16):
    """Return hours, and the hours of GPUs, cores and GiB of sandboxes, of the full run."""
    hours = full.steps * max(full.clients * TRAINER, rollouts(attempt, kept)) / 3600
    attempts = full.clients * full.steps * full.groups_per_batch * full.group_size / kept
    seconds = attempt * np.exp(0.6**2 / 2) + grading * np.exp(0.5**2 / 2)
    boxes = attempts * seconds / 3600
    return hours, gpus * hours, full.sandbox_cpus * boxes, full.sandbox_memory_mb / 1024 * boxes


hours, *amounts = estimate()
print(f"{full.steps} steps of {full.clients} clients: {hours:.0f} hours")
prices = {"GPU hours": GPU_HOUR, "core hours": CORE_HOUR, "GiB hours": GIB_HOUR}
for (name, price), amount in zip(prices.items(), amounts, strict=True):
    told = f"at {price} = {amount * price:,.0f}" if price else "(no price given)"
    print(f"{amount:12,.0f} {name:11} {told}")

# %% [markdown]
# Two lessons. Under these assumptions the run takes five days, while one part of it ends after the 24 `hours` of the
# preset: going on where it stopped is not the exception but the plan. And the trainer's seconds decide, since every
# second saved there is saved 800 times.
#
# For comparison: of a mathematics task, 8 clients and 30 updates, Spindle's authors report 323 s a step and a cost of
# 235.78 dollars, which is 0.98 dollars a client and update. For SWE-Gym they published no cost.
#
# ## 9. Leave it alone, come back tomorrow
#
# A run's folder holds all there is to know, so that whoever can read it can watch: `swegym-tutorial show FOLDER` in
# any terminal, or this in any notebook. It works while the run goes on in another process, and after its end.

# %%
Dashboard(str(folder))
print("and to go on with it:  swegym-tutorial train --resume --output", folder)

# %% [markdown]
# The driver can leave your machine too. `swegym_tutorial.modal_app` runs it on Modal, with the folder on a volume
# that is committed after each step, so that you can close the laptop. The same call again goes on with the same
# run:
#
# ```bash
# modal run --detach -m swegym_tutorial.modal_app::full --name full --clients 8 --steps 100 --hours 23
# modal volume get swegym-tutorial-runs full runs/     # a copy, at any time
# ```
#
# There the key lies in a Modal secret that only the driver's container gets; the sandboxes are opened with that
# container's own rights.
#
# ## Summary
#
# - The full run is the same code with other numbers; one word, and two variables of the environment, lead to it.
# - Doctor and preflight try everything before anything is paid for.
# - Clients share the frozen model and the server's time; adapter, order of tasks and checkpoints are their own.
# - What a run takes is a short formula of your own numbers. Measure them with one step of one client.
#
# Next: [08_make_it_yours](08_make_it_yours.ipynb) puts your own tasks, reward, sandbox and model into the same
# loop.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.


# %% [markdown]
# **Exercise 1.** Your attempts take 540 s in the median. How many clients does it take at least to keep the trainer
# busy all the time?
#
# <details><summary>Solution</summary>
#
# As many as the workers' time holds trainer's times, rounded up; or try one after the other.
#
# ```python
# answer = next(n for n in range(1, 100) if busy(n, 540) == 1)
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a number of clients

# %% tags=["check"]
check(answer, int(np.ceil(rollouts(540) / TRAINER)), rtol=0.01)

# %% [markdown]
# **Exercise 2.** Eight clients are to do 100 batches each in 24 hours, on one trainer that does one thing at a
# time. How many seconds may it spend on one batch of one client?
#
# <details><summary>Solution</summary>
#
# ```python
# answer = 24 * 3600 / (8 * 100)
# ```
#
# A fifth of what section 8 assumes.
#
# </details>

# %% tags=["exercise"]
answer = None  # seconds

# %% tags=["check"]
check(answer, full.hours * 3600 / (full.clients * full.steps), rtol=0.01)

# %% [markdown]
# **Exercise 3.** The full run's adapters are of rank 32. How many numbers would such an adapter of the tiny model
# have? Use `layers` and `matrices`.
#
# <details><summary>Solution</summary>
#
# Twice as many as one of rank 16.
#
# ```python
# answer = 32 * layers * sum(a + b for a, b in matrices)
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a number of numbers

# %% tags=["check"]
check(answer, adapter * spindle["lora_rank"] // laptop["lora_rank"], rtol=0.01)
