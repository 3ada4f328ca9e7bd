# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Minibatches: from rewards to gradients
#
# | | |
# |---|---|
# | **Goal** | Follow a reward of 0 or 1 until it is one number for each token, and know what each number on the way is for. |
# | **You need** | [00_quickstart](00_quickstart.ipynb), NumPy, and what a gradient is. No reinforcement learning. |
# | **Time** | About 20 minutes to read; the cells run in half a minute. |
# | **Cost** | None: no account, no GPU, no network, no server. |
#
# ## The way in one line
#
# rewards of a group → advantages → which groups are kept → a weight for each token → one `Datum` an attempt →
# minibatches → the loss.
#
# The method is called *group-relative policy optimisation*, GRPO ([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)),
# with three changes that [DAPO](https://arxiv.org/abs/2503.14476) made: groups that can't teach are dropped, the clip is
# wider above than below, and every token counts the same (section 7). The KL term sits in the advantage instead of the
# loss. The formulas that the package computes stand here twice, as math and as a few lines of code, and the cell then
# asserts that the package gives the same.

# %% [markdown]
# ## 1. Settings
#
# Nothing here talks to a server, so that there is no switch to a real one: what you see is exactly what a full run
# computes on the client, before it sends anything.

# %% tags=["parameters"]
SEED = 0  # another seed, other draws in the simulations
GROUP_SIZE = 8  # attempts at one task; try 4 or 16, and run all cells again

# %% [markdown]
# `minibatch.py` is the module that this notebook explains. The loss comes from the local training server, since that
# is where it is computed.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoTokenizer

from swegym_tutorial import TrainingConfig, advantages, load_tasks, prepare_minibatch
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.exercises import check
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.minibatch import Fate, Group, fate_of, split_evenly, token_advantages
from swegym_tutorial.rollout import Chat, Ending, Rollout
from swegym_tutorial.server.losses import LossInputs, token_losses
from swegym_tutorial.server.records import LossName, TrainBatch

config = TrainingConfig.laptop()
random = np.random.default_rng(SEED)


# %% [markdown]
# ## 2. A group
#
# Attempts at one task, all sampled from one version of the model, make a group. Why groups? A reward by itself says
# little: a 1 at an issue that the model always solves is no achievement, and a 0 at one that nobody solves is no
# failure. Seven other attempts at the *same* issue tell what was to be expected, and no second network has to learn to
# predict it.
#
# A real attempt needs a model, a sandbox and tests. What follows needs only rewards and a few arrays, so we make some up:
# `attempt` makes an attempt of four tokens, of which the last two were sampled by the model.


# %%
def attempt(reward, mask=(0, 0, 1, 1), logprobs=(0.0, 0.0, -1.0, -2.0)):
    """Return a graded attempt with made-up tokens."""
    arrays = np.arange(len(mask), dtype=np.int32), np.array(mask, bool), np.array(logprobs, np.float32)
    rollout = Rollout("made-up", *arrays, turns=(), ending=Ending.FINAL, patch=b"", seconds=1.0)
    return Episode(rollout, Verdict(Outcome.RESOLVED if reward else Outcome.UNRESOLVED))


def group(rewards, version=0):
    """Return a group of made-up attempts, sampled from a version of the policy."""
    return Group(0, "made-up", version, tuple(attempt(reward) for reward in rewards))


print("rewards:", group([1, 0, 0, 1]).rewards)


# %% [markdown]
# ## 3. Advantages
#
# How much better was an attempt than its group, in units of the group's spread?
#
# $$A_i = \frac{r_i - \bar r}{s + 10^{-6}}, \qquad
# \bar r = \frac1n \sum_j r_j, \qquad
# s = \sqrt{\frac{1}{n-1}\sum_j (r_j - \bar r)^2}$$
#
# The small number in the denominator prevents a division by zero. The advantages of a group add up to 0: what is made
# more likely and what is made less likely balance.


# %%
def our_advantages(rewards):
    rewards = np.asarray(rewards, dtype=float)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


for rewards in ([1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]):
    assert np.allclose(our_advantages(rewards), advantages(rewards))
    print(rewards, "->", advantages(rewards).round(2))

# %% [markdown]
# Read the first line and the last: a success that is rare is a discovery (+2.47), and so is a failure where all else
# succeeded (-2.47). What everybody does hardly moves the model.
#
# ## 4. Which groups are kept
#
# Four fates, decided by `fate_of`:
#
# - **kept**: mixed rewards, and fresh enough. Trained on.
# - **uniform**: all rewards equal. Every advantage is 0, and so is the gradient (but for the KL term of section 8).
# - **stale**: sampled too many publications ago. (After each batch the new weights are *published* to the part of the server
#   that samples. The model as it samples is called the *policy*.) A run samples the next groups while it trains; a group whose policy
#   is more than `max_staleness` = 1 publication old no longer tells what the present one does.
# - **failed**: too few attempts are left. A crashed sandbox or a lost answer costs an attempt, and its group only where
#   fewer than `min_group_size` = 2 are left: otherwise the others are a *partial group*, and their advantages are worked
#   out among themselves.

# %%
one_of_n = [1] + [0] * (GROUP_SIZE - 1)
examples = {
    "one solved": group(one_of_n, version=5),
    "none solved": group([0] * GROUP_SIZE, version=5),
    "all solved": group([1] * GROUP_SIZE, version=5),
    "one solved, by version 3": group(one_of_n, version=3),
    "three attempts left": group([1, 0, 0], version=5),
    "a single attempt left": group([1], version=5),
}
for name, each in examples.items():
    print(f"{name:26}{fate_of(each, 5, config.min_group_size, config.max_staleness)}")
print("\nthe partial group:        ", advantages([1, 0, 0]).round(2))
print("lost ones counted as 0:   ", advantages([1, 0, 0, 0, 0, 0, 0, 0])[:3].round(2))

# %% [markdown]
# The last two lines show why a lost attempt is left out instead of being counted as a failure: five crashed
# sandboxes would make the same success look twice as remarkable, and the model would be pushed by the infrastructure.
#
# ## 5. How many groups can teach?
#
# Let the model solve an issue with probability $p$. A group of $n$ is uniform if all of its attempts succeed or all fail, so
# that it carries a signal with probability
#
# $$P(\text{mixed}) = 1 - p^n - (1-p)^n .$$
#
# Left, the formula as lines, and as dots the share of 200 simulated groups that `fate_of` keeps. Right, the advantages of a
# success and of a failure, by how many of the group succeeded.

# %%
rates, solved = np.linspace(0, 1, 101), np.arange(1, GROUP_SIZE)
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3), dpi=100, layout="constrained", facecolor="white")
for n, color in {4: "#E69F00", GROUP_SIZE: "#0072B2"}.items():
    left.plot(rates, 1 - rates**n - (1 - rates) ** n, color=color, label=f"groups of {n}")
for p in np.linspace(0, 1, 21):
    drawn = random.random((200, GROUP_SIZE)) < p
    kept = [fate_of(group(row), 0, 2) is Fate.KEPT for row in drawn]
    left.plot(p, np.mean(kept), "o", color="#0072B2", ms=3)
left.set(xlabel="solve rate p", ylabel="share of groups kept", title="Which groups carry a signal")
left.legend(frameon=False, loc="lower center", fontsize=9)
pairs = np.array([advantages([1] * k + [0] * (GROUP_SIZE - k))[[0, -1]] for k in solved])
right.plot(solved, pairs[:, 0], "o-", color="#0072B2", label="a success")
right.plot(solved, pairs[:, 1], "s--", color="#D55E00", label="a failure")
right.axhline(0, color="#BBBBBB", lw=0.8)
right.set(xlabel=f"solved of {GROUP_SIZE}", ylabel="advantage", title="What an attempt is worth")
right.legend(frameon=False, loc="upper right", fontsize=9)
plt.show()

# %% [markdown]
# **What you should see.** The dots lie on their line, as far as chance lets them. Between solve rates of 0.3 and 0.7 at
# most 6 of 100 groups of eight are wasted; at 0.01 only 8 of 100 are of use. So tasks are best chosen neither too easy nor too
# hard, and late in a run, when the model is good at all of them, groups become uniform and batches slow to fill. On the
# right, what is rare is far from zero: a success among failures, or a failure among successes.

# %% [markdown]
# ## 6. Tokens and their mask
#
# A reward is about a whole attempt; training is about tokens. Of an attempt's tokens only some are the model's own
# words. The prompt and what the commands printed were written by others, and nothing in them is to be learned. So
# each attempt comes with a *mask*: true where a token was sampled.
#
# Here is an attempt with real text and the real tokenizer. We write the model's two turns ourselves, and draw the
# log-probabilities that a server would have sent with them.

# %%
chat = Chat(AutoTokenizer.from_pretrained(POLICY), config.system_prompt)
task = load_tasks(split="train")[0]
call = "<tool_call>\n<function=bash>\n<parameter=command>\n{}\n</parameter>\n</function>\n</tool_call>"
look = "Look first.\n</think>\n\n" + call.format("cat src/cart.py")
parts = [
    ("prompt", chat.prompt(task), False),
    ("turn 1", chat.encode(look) + chat.stop_tokens, True),
    ("observation", chat.observations(["def adjust_height(angle, pace):\n"], stopped=True), False),
    ("turn 2", chat.encode("Done.\n</think>\n\nIt is fine.") + chat.stop_tokens, True),
]
tokens = np.concatenate([ids for _, ids, _ in parts]).astype(np.int32)
mask = np.concatenate([np.full(len(ids), own) for _, ids, own in parts])
logprobs = np.where(mask, -random.exponential(0.5, len(tokens)), 0.0).astype(np.float32)
for name, ids, own in parts:
    print(f"{name:12}{len(ids):4} tokens, {'sampled' if own else 'given':8} {chat.decode(list(ids))[-36:]!r}")


# %% [markdown]
# ## 7. A weight for each token
#
# Each sampled token gets its attempt's advantage, divided by the number $N$ of sampled tokens in the whole minibatch; all
# others get 0:
#
# $$w_t = \frac{m_t}{N} \Bigl( A - \beta \bigl(\log \pi_{\text{sampled}}(x_t) - \log \pi_{\text{ref}}(x_t)\bigr) \Bigr)$$
#
# The part with $\beta$ is the next section's. Dividing by one common $N$ means that each token counts the same, in long
# attempts as in short ones. Dividing by the length of each attempt instead would make every token of a rambling
# failure cheaper, and teach the model to ramble where it fails.


# %%
def our_weights(mask, logprobs, advantage, generated, reference=None, kl_coef=0.0):
    value = np.full(len(mask), advantage)
    if reference is not None:
        value -= kl_coef * (logprobs - reference)
    return np.where(mask, value / generated, 0.0)


ours = our_weights(mask, logprobs, advantage=1.5, generated=200)
assert np.allclose(ours, token_advantages(mask, logprobs, 1.5, 200, None, 0.0))
print("different weights in the attempt:", np.unique(ours))

# %% [markdown]
# ## 8. The KL term
#
# A model that is trained on one thing may forget others. The KL term is a leash to the *reference*, which is the model
# before training: $\log \pi_{\text{sampled}} - \log \pi_{\text{ref}}$ is positive where the trained model likes a token more than the
# reference did, and its mean over sampled tokens estimates the Kullback-Leibler divergence between the two. Taking
# $\beta$ (`kl_coef`) times this off the advantage makes straying cost reward.
#
# The full run has $\beta = 10^{-4}$, a hint of a leash; the laptop's run has 0 and asks for no reference at all. Below it
# is 0.2, so that one can see it.

# %%
shown = np.flatnonzero(mask)[:4]
reference = np.where(mask, logprobs * random.uniform(0.2, 3.0, len(mask)), 0.0)
held = token_advantages(mask, logprobs, 1.5, 200, reference, 0.2)
assert np.allclose(our_weights(mask, logprobs, 1.5, 200, reference, 0.2), held)
print(f"{'token':14}{'logprob':>12}{'reference':>12}{'difference':>12}{'weight x N':>12}")
for t in shown:
    numbers = (logprobs[t], reference[t], logprobs[t] - reference[t], 200 * held[t])
    print(f"{chat.decode([int(tokens[t])])!r:14}", *(f"{number:11.2f}" for number in numbers))

# %% [markdown]
# Without the term each of these tokens would weigh 1.5. Where the difference is positive it weighs less now, where it is
# negative more. The term is a plain number, part of the reward; no gradient flows through it.
#
# ## 9. One Datum, opened
#
# `prepare_minibatch` does all of this for a list of groups, and packs each attempt as the `tinker` SDK wants it. A
# language model that reads tokens 0 to $t$ predicts token $t + 1$. So the input is all tokens but the last,
# and everything else is shifted by one: `target_tokens[t]` is what should come next, `logprobs[t]` how likely the
# sampling model found it, `advantages[t]` its weight.

# %%
rollout = Rollout(task.instance_id, tokens, mask, logprobs, (), Ending.FINAL, b"", 1.0)
success, failure = (Episode(rollout, Verdict(o)) for o in (Outcome.RESOLVED, Outcome.UNRESOLVED))
data = prepare_minibatch([Group(0, task.instance_id, 0, (success, failure))])
inputs = {name: field.to_numpy() for name, field in data[0].loss_fn_inputs.items()}
assert (data[0].model_input.to_ints() == tokens[:-1]).all() and (inputs["target_tokens"] == tokens[1:]).all()
print(len(data), "data of", len(inputs["target_tokens"]), "targets\n")
print(f"{'reads':>24}  {'should say':24}{'logprob':>9}{'weight':>10}")
for t in range(np.argmax(mask) - 3, np.argmax(mask) + 3):
    reads, says = (repr(chat.decode([int(i)])) for i in (tokens[t], inputs["target_tokens"][t]))
    print(f"{reads:>24}  {says:24}{inputs['logprobs'][t]:9.2f}{inputs['advantages'][t]:10.5f}")


# %% [markdown]
# The weight begins one row before the first word of the model's own is *read*: there it is *said*. It is the success's
# advantage, 0.707, divided by the sampled tokens of both attempts.
#
# ## 10. The loss, and its clip
#
# By the time of training the model is not quite the one that sampled: the minibatches before this one have moved it, and in
# an asynchronous run those of an earlier batch, too.
# The ratio $\rho_t = \pi(x_t) / \pi_{\text{sampled}}(x_t)$ says by how much, for one token. The loss of
# *proximal policy optimisation*, PPO ([arXiv:1707.06347](https://arxiv.org/abs/1707.06347)), follows the weight, but only up to
# a point:
#
# $$L = -\sum_t \min\bigl(\rho_t w_t, \operatorname{clip}(\rho_t, 0.8, 1.28) w_t\bigr)$$
#
# Minus the loss is what is maximised; the figure shows it for one token of weight +1 and one of weight -1.


# %%
def our_loss(logprobs, sampled, weights):
    ratio = torch.exp(logprobs - sampled)
    return -torch.minimum(ratio * weights, ratio.clamp(config.clip_low, config.clip_high) * weights)


ppo = TrainBatch([], LossName.PPO, config.clip_low, config.clip_high)
ratio, zeros = torch.linspace(0.4, 1.8, 141), torch.zeros(141)
figure, panels = plt.subplots(1, 2, figsize=(7, 2.8), dpi=100, layout="constrained", facecolor="white")
for axes, weight in zip(panels, (1.0, -1.0), strict=True):
    weights = torch.full((141,), weight)
    theirs = token_losses(ppo, ratio.log(), LossInputs(None, zeros, weights))
    assert torch.equal(theirs, our_loss(ratio.log(), zeros, weights))
    flat = (config.clip_high, 1.8) if weight > 0 else (0.4, config.clip_low)
    axes.axvspan(*flat, color="#EEEEEE", lw=0)
    axes.text(np.mean(flat), 0.6 if weight > 0 else -1.4, "no\ngradient", ha="center", va="center")
    axes.plot(ratio, ratio * weight, "--", color="#999999", lw=1, label="without the clip")
    axes.plot(ratio, -theirs, color="#0072B2" if weight > 0 else "#D55E00", lw=2, label="with it")
    axes.axvline(1, color="#BBBBBB", lw=0.8)
    axes.set(xlabel="ratio", ylabel="minus the loss", xticks=[0.4, config.clip_low, 1, config.clip_high, 1.8])
    axes.set_title(f"weight {weight:+.0f}: make it {'more' if weight > 0 else 'less'} likely")
    axes.legend(frameon=False, fontsize=9, loc="upper left" if weight > 0 else "upper right")
plt.show()

# %% [markdown]
# **What you should see.** Left, the token helped. Its probability is pushed up until it is 1.28 times what it was;
# beyond that the curve is flat, and this token pushes no more. Right, the token hurt. It is pushed down to 0.8 times
# what it was. In the other directions nothing is clipped, so that a step that went the wrong way can be taken back.
#
# The room above (0.28) is larger than the one below (0.2): that is DAPO's change. A token that is rare can only become
# common by large ratios, and a tighter bound would keep the model from new ways.
#
# ## 11. Minibatches of even size
#
# A batch is the groups that were kept between two publications. It is cut into minibatches of at most
# `minibatch_groups`, and each is one `forward_backward` and one `optim_step`. Each is divided by its own $N$, so that a
# lonely group at the end would pull as hard as four together. `split_evenly` prevents that.


# %%
def pull(minibatch):
    """Return how hard each of its groups pulls: the sum of all absolute weights, by group."""
    weights = [datum.loss_fn_inputs["advantages"].to_numpy() for datum in prepare_minibatch(minibatch)]
    return round(float(np.abs(weights).sum()) / len(minibatch), 2)


batch = [group(one_of_n) for _ in range(9)]
in_order = [batch[:4], batch[4:8], batch[8:]]
for name, parts in (("cut in order", in_order), ("split_evenly", split_evenly(batch, 4))):
    print(f"{name}: groups {[len(p) for p in parts]}, pull of each group {[pull(p) for p in parts]}")

# %% [markdown]
# ## 12. The learning rate's course
#
# Adam divides a step by the usual size of past gradients, and at the start has seen next to none. So the first
# steps are made smaller, over `warmup_steps` $= W$. The last ones are made smaller too, over the share
# `cooldown_share` $= C$ of all $S$ steps: late in a run most groups are resolved by all their attempts and drop out,
# and what the few mixed ones ask for, at the full rate, can undo a skill that training never visits
# ([docs/world.md](../docs/world.md) shows such a run).
#
# $$\eta_s = \eta \cdot \min\Bigl(1, \frac{s + 1}{\max(1, W)}, \frac{S - s}{C \, S}\Bigr), \qquad s = 0, \dots, S - 1$$
#
# A step is a batch here; all of its minibatches have the same rate. With $C = 0$ the last term is left out. The full run
# takes steps so small that it goes without either. (A run that is extended, as by `--resume --steps 60`, goes on at the
# rates of the longer course: there the rate may rise once more.)


# %%
def our_rate(config, step):
    terms = [1.0, (step + 1) / max(1, config.warmup_steps)]
    if config.cooldown_share:
        terms.append((config.steps - step) / (config.cooldown_share * config.steps))
    return config.learning_rate * min(terms)


# %% [markdown]
# Ten steps of the laptop's preset, the same without the end's slowing down, and the full run's:

# %%
courses = [TrainingConfig.laptop(steps=10, cooldown_share=share) for share in (0.5, 0)]
for course in (*courses, TrainingConfig.spindle(steps=10)):
    ours = [our_rate(course, step) for step in range(course.steps)]
    assert np.allclose(ours, [course.learning_rate_at(step) for step in range(course.steps)], atol=0)
    print(f"{course.preset:8}", *(f"{rate:.1e}" for rate in ours))


# %% [markdown]
# ## Summary
#
# - A reward becomes an advantage by comparison with attempts at the same issue; a group of equals has nothing to say.
# - An advantage becomes a weight for each token that the model sampled, divided by all of the minibatch's; the KL term
#   makes straying from the reference cost a little.
# - A `Datum` is an attempt with everything shifted by one, and the clip bounds how far one batch can move a token.
# - The client's part of it is `minibatch.py`, 150 lines that know nothing of sandboxes, servers or threads.
#
# ## Exercises
#
# Put your answer into the first cell of each, run both. The check says whether it is right.

# %% [markdown]
# **Exercise 1.** Your model solves an issue once in ten attempts. How large must groups be at least, for 9 of 10 groups to
# carry a signal?
#
# <details><summary>Solution</summary>
#
# That all of them succeed has a chance of $0.1^n$, next to nothing, so that $1 - 0.9^n \ge 0.9$ decides: $n \ge \log 0.1 / \log 0.9 = 21.9$.
#
# ```python
# answer = next(n for n in range(2, 100) if 1 - 0.1**n - 0.9**n >= 0.9)
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a whole number

# %% tags=["check"]
sizes = np.arange(2, 100)
check(answer, sizes[np.argmax(1 - 0.1**sizes - 0.9**sizes >= 0.9)])

# %% [markdown]
# **Exercise 2.** Six tokens have the ratios 0.7, 1.0 and 1.5, first with weight +1 each, then with weight -1 each. Which of
# them have a gradient? Write six times `True` or `False`.
#
# <details><summary>Solution</summary>
#
# Only what has gone too far in its own direction is flat: +1 beyond 1.28, and -1 below 0.8.
#
# ```python
# answer = [True, True, False, False, True, True]
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # a list of six truth values

# %% tags=["check"]
moved = torch.tensor([0.7, 1.0, 1.5] * 2).log().requires_grad_()
signs = torch.tensor([1.0] * 3 + [-1.0] * 3)
token_losses(ppo, moved, LossInputs(None, torch.zeros(6), signs)).sum().backward()
check(answer, (moved.grad != 0).tolist())

# %% [markdown]
# **Exercise 3.** A minibatch is one group of two attempts. The first earned 1 with 30 sampled tokens, the second 0 with
# 90. The two advantages are opposite; are the sums of the two attempts' weights? Work out both sums.
#
# <details><summary>Solution</summary>
#
# The advantages are $\pm\sqrt{1/2}$, and $N = 120$. A long attempt moves more tokens, each by the same amount.
#
# ```python
# answer = [0.7071 * 30 / 120, -0.7071 * 90 / 120]
# ```
#
# </details>

# %% tags=["exercise"]
answer = None  # two numbers

# %% tags=["check"]
short, long = (attempt(r, [0] + [1] * n, [0.0] + [-1.0] * n) for r, n in ((1, 30), (0, 90)))
made = prepare_minibatch([Group(0, "made-up", 0, (short, long))])
check(answer, [each.loss_fn_inputs["advantages"].to_numpy().sum() for each in made])
