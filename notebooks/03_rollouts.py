# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Rollouts: one attempt, turn by turn
#
# | | |
# |---|---|
# | **Goal** | Make one attempt by hand with a real model and a real sandbox, and see what of it training needs: tokens, mask, log-probabilities. |
# | **You need** | [02_bash_tool](02_bash_tool.ipynb), which tells how a command becomes tokens and back. No reinforcement learning. |
# | **Time** | 20 minutes to read; the cells take about a minute. |
# | **Cost** | None: no account, no GPU, no network. |
#
# ## What is rolled out
#
# A *policy* is a model that acts: given all that has happened so far, it draws what to do next. Letting it act from an
# issue to its last word is a *rollout*, and what comes out is an *attempt*. All the rest of this project, rewards,
# groups and gradients, works on attempts that are over; this notebook makes some.
#
# The policy here is the bundled one, 0.7 million parameters. It runs in a training server on this machine, which speaks
# the same protocol as a large one: we send token ids, and get token ids back, each with its log-probability.

# %% [markdown]
# ## 1. Settings
#
# The switch to real servers is the first line. `spindle` samples from Qwen3.5-9B on your Tinker-compatible server
# (`TINKER_BASE_URL` and `TINKER_API_KEY` must be set) and opens SWE-Gym's repositories on Modal (`modal setup`); an attempt
# then takes minutes, and costs money.

# %% tags=["parameters"]
import os

QUICK = os.environ.get("SWEGYM_TUTORIAL_QUICK") == "1"
PRESET = "laptop"  # or "spindle"
SEED = 2  # of the first attempt; another seed, another attempt
TASKS = 1 if QUICK else 3  # for the comparison of temperatures, eight attempts each

# %% [markdown]
# Four parts make an attempt: a task, a *chat* that turns conversations into tokens, a *sampler* that goes on where
# tokens end, and sandboxes. `connect` starts the local server, or finds yours; `first_client` asks it for the
# model's tokenizer. What is opened here is closed by the last cell.

# %%
import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from IPython.display import display
from matplotlib.figure import Figure

from swegym_tutorial import EpisodeViewer, TrainingConfig, generate_rollout, load_tasks
from swegym_tutorial.attempts import AttemptRunner, Identity
from swegym_tutorial.connect import connect, first_client, server_from_environment
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.exercises import check
from swegym_tutorial.grading import Grader
from swegym_tutorial.habits import MEANINGS, habits_of, rates
from swegym_tutorial.halt import Halt
from swegym_tutorial.plots import picture
from swegym_tutorial.rollout import Sample
from swegym_tutorial.sandbox import SandboxError, backend
from swegym_tutorial.tools import observation, parse_tool_calls

# %% [markdown]
# The base model's sampler is the policy before any training. The folder will hold attempts, as a run's does.

# %%
config = {"laptop": TrainingConfig.laptop, "spindle": TrainingConfig.spindle}[PRESET]()
folder = RunFolder(Path("runs") / time.strftime("rollouts-%Y%m%d-%H%M%S"))
folder.open()
(folder.path / "config.json").write_text(json.dumps(config.to_json()))
closing, halt = contextlib.ExitStack(), Halt()
service = connect(config, folder, server_from_environment(config), halt, closing, on_death=print)
_, chat = first_client(service, config)
sampler, sandboxes = service.base_sampler(), backend(config.sandbox, config, say=print)

# %% [markdown]
# ## 2. The first turn
#
# The prompt is the system message with the tool, the issue, and the opening of the assistant's message, as tokens. The
# sampler goes on from there: it draws one token after the other until a *stop token* ends the turn, or
# `turn_tokens` are used up.
#
# A *log-probability* is the logarithm of the chance that the model gave to the token that was drawn: 0 is certainty, -0.7 a toss
# of a coin, -4.6 one in a hundred.

# %%
task = load_tasks(config.tasks, split="train")[0]
print("Issue:", task.problem_statement)
prompt = chat.prompt(task)
sample = sampler.sample(prompt, config.turn_tokens, SEED)
print(f"\n{len(prompt)} tokens of prompt, {len(sample.tokens)} sampled, stopped by itself: {sample.stopped}\n")
for token, logprob in zip(sample.tokens[:14], sample.logprobs, strict=False):
    text = chat.tokenizer.decode([token])
    print(f"{token:6} {logprob:8.3f}  {np.exp(logprob):7.1%}  {text!r}")

# %% [markdown]
# The model is sure of most tokens: once it has begun to write a call, the form leaves no choice. At a few it could have gone
# another way (here at the first word; most of the rest went to *Guess the file.*), and those decide what becomes of the attempt.
#
# ## 3. From the turn to the next prompt
#
# The text is only for the parser; the tokens go on as they are. What the command prints comes back as an observation, encoded with
# all that the chat template puts around it. The next prompt is the old prompt, the turn's tokens and the observation, in a row, and that is the whole trick: nothing is
# rendered anew, so that the model sees its own words exactly as it wrote them.

# %%
sandbox = closing.enter_context(contextlib.closing(sandboxes.open(task)))


def act(sample):
    """Run the calls of a turn; return what follows the turn as tokens, or None after the final answer."""
    calls = parse_tool_calls(chat.decode(sample.tokens))
    run = partial(sandbox.exec, timeout=config.tool_timeout)
    shown = [call.error or observation(run(call.command), config.observation_chars) for call in calls]
    return chat.observations(shown, stopped=sample.stopped) if calls else None


after = act(sample)
print(chat.tokenizer.decode(sample.tokens + (after or [])))

# %% [markdown]
# ## 4. Until the answer
#
# The same in a loop is the whole agent. Each turn gets a seed of its own. We keep a list of parts, each with its name and whether
# it was sampled.

# %%
parts = [("prompt", prompt, None), ("turn 1", sample.tokens, sample.logprobs), ("output", after, None)]
while parts[-1][1] is not None:
    turn = len(parts) // 2
    so_far = [token for _, tokens, _ in parts for token in tokens]
    sample = sampler.sample(so_far, config.turn_tokens, SEED + turn)
    parts += [(f"turn {turn + 1}", sample.tokens, sample.logprobs), ("output", act(sample), None)]
parts.pop()  # after the final answer nothing follows
print(chat.tokenizer.decode([token for _, tokens, _ in parts[3:] for token in tokens]))

# %% [markdown]
# Three arrays of equal length are what training needs of it: the *tokens*; the *mask*, true where the policy spoke; and the
# *log-probabilities* of what it said. `generate_rollout` does all of this, and also opens the sandbox, heeds the limits,
# answers broken calls, and captures the patch. With the same seed it must come to the same tokens:

# %%
tokens = np.array([token for _, ids, _ in parts for token in ids])
mask = np.concatenate([np.full(len(ids), logprobs is not None) for _, ids, logprobs in parts])
logprobs = np.concatenate([logprobs or np.zeros(len(ids)) for _, ids, logprobs in parts])
rollout = generate_rollout(task, sampler, chat, sandboxes, config, seed=SEED)
if PRESET == "laptop":  # a large server may not honour seeds
    assert np.allclose([rollout.tokens, rollout.mask, rollout.logprobs], [tokens, mask, logprobs], atol=1e-3)
print(f"{len(rollout.turns)} turns, {len(tokens)} tokens, {mask.sum()} sampled, ended: {rollout.ending}")
print(rollout.patch.decode())

# %% [markdown]
# ## 5. An attempt in one picture
#
# Above, who wrote what: grey was given to the model, blue was sampled. Below, how surprising each sampled token was: minus its
# log-probability. (Orange: a surprise of more than 0.1. Light blue: the others.) A toss of a coin has a surprise of 0.7, a token of one in a hundred 4.6; a surprise of 0.01 means that
# another token had a chance of 1 in 100.
# The scale is logarithmic, or all but the highest bars would be too short to be seen.

# %%
figure = Figure(figsize=(8, 4), layout="constrained", facecolor="white")
strip, bars = figure.subplots(2, 1, sharex=True, height_ratios=(1, 7))
starts = np.cumsum([0, *(len(ids) for _, ids, _ in parts)]) - 0.5
for (name, ids, own), start in zip(parts, starts, strict=False):
    color, ink = ("#DDDDDD", "#444444") if own is None else ("#0072B2", "white")
    strip.barh(0, len(ids), left=start, color=color, edgecolor="white")
    strip.text(start + len(ids) / 2, 0, name, ha="center", va="center", color=ink, fontsize=7.5)
    if own is None:
        bars.axvspan(start, start + len(ids), color="#F2F2F2", lw=0)
strip.axis("off")
surprise = np.maximum(-logprobs, 1e-6)
for t in np.flatnonzero(mask):
    chosen = surprise[t] > 0.1
    bars.vlines(t, 1e-7, surprise[t], color="#D55E00" if chosen else "#56B4E9", lw=3)
    if surprise[t] > 2e-4:
        said = chat.tokenizer.decode([int(tokens[t])]).strip()
        size, turned = (10, 0) if chosen else (8, 90 * (len(said) > 1))  # neighbours are close
        bars.text(t, 1.7 * surprise[t], said, ha="center", fontsize=size, rotation=turned)
bars.set(yscale="log", ylim=(1e-7, 20), xlabel="position in the attempt, in tokens", ylabel="surprise: -log p")
bars.set_yticks([1e-6, 1e-4, 1e-2, 1], ["0.000001", "0.0001", "0.01", "1"])
bars.minorticks_off()
choices = (surprise > 0.1).sum()
picture(figure, f"{len(tokens)} tokens, given and sampled in turn; {choices} of the sampled stand out.")

# %% [markdown]
# **What you should see.** A few tokens stand out. There the model *chose*. With `SEED = 2` they are the first words of three thoughts: *Look*,
# where it could have guessed; *Fix* (the line), where it could have replaced every match, or stopped; and *Run* (the tests), where it could
# have been done. A guesser chooses what it can't know: which file has the bug, and which text in it is wrong.
# All else follows from those almost by itself: once a call has begun, its form leaves no choice. Training moves the choices; where
# the probability is 1 already, the gradient is next to 0.
#
# ## 6. Why token-exact
#
# It would be simpler to keep the *text* of an attempt, and to encode it again for training. Would that be the same? We
# draw 96 first turns, and as many at higher *temperatures*, which flatten the probabilities before each draw, and encode
# their text again. One that comes back with other tokens for the very same text is then shown from the
# difference on, with the log-probability that the server gives to each token.


# %%
def server_logprobs(ids):
    """Ask the server how likely it finds each of these tokens after the prompt."""
    return sampler.logprobs(np.array(prompt + ids)).result()[len(prompt) :]


found = []
for temperature in (1.0, 1.5, 2.0):
    hot = service.base_sampler(temperature=temperature)
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda seed: hot.sample(prompt, 80, seed).tokens, range(96)))
    pairs = [(ids, chat.encode(chat.tokenizer.decode(ids))) for ids in drawn]
    found.append([pair for pair in pairs if pair[0] != pair[1]])
    print(f"temperature {temperature}: {len(found[-1])} of 96 turns come back as other tokens")
# Half a character would be shown as a question mark: take a pair without.
clean = (pair for pairs in found for pair in pairs if "\ufffd" not in chat.tokenizer.decode(pair[0]))
pair = next(clean, found[-1][0])
differ = next(n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
for name, ids in zip(("drawn", "read again"), pair, strict=True):
    values = server_logprobs(ids)
    print(f"\n{name}: {len(ids)} tokens, log-probabilities add up to {values.sum():.1f}")
    for token, value in list(zip(ids, values, strict=True))[differ : differ + 4]:
        print(f"{token:6} {value:8.2f}  {chat.tokenizer.decode([token])!r}")
lost = server_logprobs(pair[0]).sum() - server_logprobs(pair[1]).sum()
print(f"\na difference of {lost:.1f}: a factor of 10 to the power of {lost / np.log(10):.0f}")

# %% [markdown]
# The text is the same, letter for letter, and the model finds one row of tokens far less likely than the other: by the factor in
# the last line. Training compares the probabilities of now with those at the time of sampling, token by
# token (the *ratio* of [05_minibatches](05_minibatches.ipynb)). With other tokens it would compare apples with
# oranges, and make words more likely that nobody said.
#
# The bundled model, whose tokens are whole phrases, needs a high temperature to stumble over this. But the rule costs nothing if
# it is kept from the start, and a mistake of one attempt in a hundred is found by nobody.
#
# ## 7. How an attempt ends
#
# An attempt must end, whatever the model does. `final` is the good end: an answer without a call. The limits are on turns, on the
# tokens of a turn, and on those of the whole attempt.
# We provoke each by making one limit too small for the attempt from above.
#
# A fault of the infrastructure is no ending that the agent has earned. `generate_rollout` raises it; in a run an
# `AttemptRunner` tries again a few times, and then records an attempt without a reward. In the last row no sandbox can be had.

# %%
def no_sandbox(task):
    """Fail as a full machine does."""
    raise SandboxError("the machine is full")


limits = {
    "none": {},
    "max_turns": {"max_turns": 1},
    "turn_tokens": {"turn_tokens": 5},
    "context_tokens": {"context_tokens": len(prompt) + len(parts[1][1]) + len(parts[2][1]) + 20},
}
for name, limit in limits.items():
    ended = generate_rollout(task, sampler, chat, sandboxes, replace(config, **limit), seed=SEED)
    print(f"{name:16}{ended.ending:18}{len(ended.turns)} turns, the last: {ended.turns[-1].text[:28]!r}")
gone = SimpleNamespace(name="gone", open=no_sandbox)
runner = AttemptRunner(chat, gone, Grader(gone, config), folder, replace(config, attempt_retries=0))
runner.rollout(task, sampler, Identity("trial", "by-hand", 0, 0, task.instance_id, 0), halt)
event = EventReader(folder.path).read()[-1]
print(f"{'(no sandbox)':16}{event['ending']:18}reward {event['reward']}: {event['reason'][:60]}")

# %% [markdown]
# `generation_limit` and `context_limit` cut a turn in the middle, and a call that was cut is not run; at `turn_limit` the
# last turn's commands did run. What the attempt had changed
# by then is graded all the same: these ends are the agent's own doing, and running into them should be unlearned. But an
# infrastructure fault has the reward `None`, and is left out.
#
# ## 8. Eight at once
#
# Training needs eight attempts at one task, a *group*, and it needs many groups. Attempts spend their time waiting, for the
# server or for a command, so they run side by side in threads; the server puts what comes in together into one batch for
# the model. The `AttemptRunner` of a run also writes each into the run's folder, and grades it, which
# [04_grading](04_grading.ipynb) takes apart.

# %%
runner = AttemptRunner(chat, sandboxes, Grader(sandboxes, config), folder, config)
who = {"phase": "training", "job": "train-job0", "group": 0, "policy_version": 0}
identities = [Identity(**who, attempt=n, instance_id=task.instance_id) for n in range(8)]


def attempt(identity):
    """Make one attempt and grade it."""
    made = runner.rollout(task, sampler, identity, halt)
    return runner.grade(task, made, identity, halt)


began = time.monotonic()
with ThreadPoolExecutor(8) as pool:
    group = list(pool.map(attempt, identities))
for n, episode in enumerate(group):
    r, first = episode.rollout, episode.rollout.turns[0].text.partition("\n")[0]
    print(f"a{n} {len(r.turns)} turns {r.mask.sum():3} of {len(r.tokens):3} tokens sampled  ", end="")
    print(f"{first[:20]:20} {episode.verdict.outcome:12} reward {episode.reward:.0f}")
alone = sum(episode.rollout.seconds for episode in group)
print(f"{time.monotonic() - began:.1f} s for all, with grading; {alone:.1f} s of attempts one by one")

# %% [markdown]
# ## 9. Their habits, and one of them opened
#
# What tells these attempts apart? Five habits do, mostly, and `habits_of` reads them off an attempt's commands and exit codes. A green dot:
# the attempt has it. An orange cross: it came to the choice, and chose badly. Nothing: it never came to it, as one that has
# run no tests has nothing to repair. On top, the reward.
#
# And one of them is opened: of those with the best reward, the one with the most turns. Whatever is in a run's folder can be read with the `EpisodeViewer`: the issue, each turn
# with its commands and what they printed, the patch, the tests, and the tokens.

# %%
seen = [habits_of(episode.rollout.whole().turns) for episode in group]
figure = Figure(figsize=(8, 2.6), layout="constrained", facecolor="white")
axes, rows = figure.subplots(), {str(habit): row for row, habit in enumerate(MEANINGS)}
for n, habits in enumerate(seen):
    for habit, there in habits.items():
        mark, color = ("o", "#009E73") if there else ("X", "#D55E00")
        axes.plot(n, rows[habit], mark, color=color, ms=10)
axes.set_xticks(range(8), [f"a{n}\n{episode.reward:.0f}" for n, episode in enumerate(group)])
axes.set_yticks(range(len(rows)), list(MEANINGS.values()))
axes.set(xlim=(-0.5, 7.5), ylim=(4.5, -0.5))
axes.xaxis.tick_top()
told = "; ".join(f"{MEANINGS[habit]}: {had} of {of}" for habit, (had, of) in rates(seen).items())
display(picture(figure, f"Habits of eight attempts. {told}."))
best = max(range(8), key=lambda n: (group[n].reward, len(group[n].rollout.turns)))
EpisodeViewer(folder.path, f"g000000-a{best}")

# %% [markdown]
# **What you should see.** Many of the attempts guess, and never run the tests; where there is a reward, the crosses are few. The policy has each
# of these habits *sometimes*, and that is enough: what is rewarded in a group is made more likely.
# [00_quickstart](00_quickstart.ipynb) draws how the habits grow. Who has all five, and copies well, has what every bundled task
# asks for. The tests help in two cases: where an attempt's own edit has broken a function beside the bug, and, in every other task,
# where a second function has the same bug, which the issue doesn't mention. They show the line, and a repair mends it.
#
# ## 10. Temperature
#
# Where do the differences in a group come from? The model's probabilities are the same for all eight; only the draws differ.
# The temperature $T$ says how much: the probabilities are raised to the power $1/T$ and made to add up to 1 again. At 0 the
# likeliest token is always taken; at 1 the model is taken at its word; above, the unlikely gets its chance. We make groups of
# eight at several temperatures, and grade them. Left, how many of the eight differ; right, what became of all.

# %%
temperatures, tasks = (0.0, 0.5, 1.0, 1.5, 2.0), load_tasks(config.tasks, split="train")[:TASKS]
grader, different, outcomes = Grader(sandboxes, config), [], []
jobs = [(each, 1000 * t + 10 * n) for t, each in enumerate(tasks) for n in range(8)]
for temperature in temperatures:
    hot = service.base_sampler(temperature=temperature)
    work = partial(generate_rollout, sampler=hot, chat=chat, sandboxes=sandboxes, config=config)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda job: work(job[0], seed=job[1]), jobs))
    different.append(len({(r.task_id, tuple(r.tokens)) for r in made}) / len(tasks))
    found = [grader.grade(job[0], r.patch).outcome for job, r in zip(jobs, made, strict=True)]
    outcomes.append([found.count(kind) / len(found) for kind in ("resolved", "unresolved", "empty_patch")])

names, bottom = [str(each) for each in temperatures], np.zeros(len(temperatures))
figure = Figure(figsize=(8, 3), layout="constrained", facecolor="white")
left, right = figure.subplots(1, 2)
left.bar(names, different, color="#0072B2", width=0.6)
left.set(title="different attempts among eight", ylim=(0, 8.5), xlabel="temperature")
kinds = (("resolved", "#009E73"), ("wrong change", "#E69F00"), ("no change", "#DDDDDD"))
for (kind, color), share in zip(kinds, np.array(outcomes).T, strict=True):
    right.bar(names, share, bottom=bottom, color=color, width=0.6, label=kind)
    bottom += share
right.set(title="what became of them", ylim=(0, 1.02), xlabel="temperature")
right.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
words = f"different: {np.round(different, 1)}, resolved: {np.round(outcomes, 2)[:, 0]}"
picture(figure, f"At the temperatures {temperatures}, of eight attempts {words}.")

# %% [markdown]
# **What you should see.** At 0 all eight are the same, so that there is nothing to compare and nothing to learn. The likeliest first
# word is *Guess*, and always taking it resolves few of these or none. Above 0 most of the eight differ. At 2 nonsense prevails:
# unlikely tokens break commands, and a broken command changes nothing.
#
# Whether 0.5, 1 or 1.5 looks best here tells nothing. With at most 24 attempts behind a bar, a difference of about one attempt on the left, or of
# up to a quarter of the height on the right, may be luck: with other seeds the order may turn round. What the formula
# does say is that a higher temperature makes every draw less certain. Over hundreds of attempts expect more variety from it, and, the
# further above 1, fewer commands that work. Training samples at 1. That is also the one temperature at which the log-probabilities that the server sends, which are the model's own, tell how the tokens
# were drawn.

# %% [markdown]
# ## Summary
#
# - An attempt is one growing row of tokens: prompt, turn, observation, turn, ..., and nothing in it is ever encoded twice.
# - The mask tells what the policy said, the log-probabilities how likely it found that. A few tokens are choices, and
#   most follow from them.
# - The same text in other tokens is another attempt to the model, and a far less likely one.
# - Limits end an attempt and are the agent's own doing; infrastructure faults are nobody's, and have no reward.
# - Eight attempts differ by their draws alone. [04_grading](04_grading.ipynb) tells what they are worth.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.
#
# **Exercise 1.** How likely is the attempt of section 4: the chance that the model, given what the commands print,
# writes all of its turns just so?
#
# <details><summary>Solution</summary>
#
# Chances multiply, so logarithms add up. The tokens that were given have no part in it.
#
# ```python
# answer = np.exp(rollout.logprobs[rollout.mask].sum())
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a number from 0 to 1


# %% tags=["check"]
check(answer, lambda p: np.isclose(p, np.prod(np.exp(logprobs[mask])), rtol=0.01))

# %% [markdown]
# **Exercise 2.** Choose `context_tokens` so that the same attempt runs into the context limit in the middle of its last turn. Sixteen
# tokens at the end of the context are always left free.
#
# <details><summary>Solution</summary>
#
# The last turn must be begun and must not be finished: there has to be room for all before it, for the 16, and for a token or two.
#
# ```python
# answer = sum(len(ids) for _, ids, _ in parts[:-1]) + 16 + 2
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a whole number


# %% tags=["check"]
def last_turn_is_cut(limit):
    """Try it."""
    made = generate_rollout(task, sampler, chat, sandboxes, replace(config, context_tokens=limit), seed=SEED)
    return made.ending == "context_limit" and len(made.turns) == len(rollout.turns)


check(answer, last_turn_is_cut)

# %% [markdown]
# **Exercise 3.** Whatever has a method `sample(prompt, max_tokens, seed)` is a sampler. The check makes one that says your turns, one
# after the other. Be the policy: write the turns that resolve the issue. (`print(task.files["src/cart.py"])` shows the file.)
#
# <details><summary>Solution</summary>
#
# ```python
# call = "<tool_call>\n<function=bash>\n<parameter=command>\n{}\n</parameter>\n</function>\n</tool_call>"
# fix = call.format("sed -i '11s/ + / - /' src/cart.py")
# answer = ["Fix it.\n</think>\n\n" + fix, "Done.\n</think>\n\nIt is fixed."]
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a list of texts, one a turn


# %% tags=["check"]
class Scripted:
    """A policy that says what is written down for it."""

    def __init__(self, turns):
        self.turns = iter(turns)

    def sample(self, prompt, max_tokens, seed):
        """Return the next turn, with the token that ends it."""
        tokens = chat.encode(next(self.turns, "No more turns.")) + chat.stop_tokens
        return Sample(tokens, [0.0] * len(tokens), stopped=True)


def resolves(turns):
    """Try it."""
    made = generate_rollout(task, Scripted(turns), chat, sandboxes, config)
    return grader.grade(task, made.patch).outcome == "resolved"


check(answer, resolves)

# %% [markdown]
# ## The end
#
# The server and the sandboxes go. (They also would with the kernel: none outlives the process that opened it.)

# %%
sandboxes.close()
closing.close()
folder.close()
