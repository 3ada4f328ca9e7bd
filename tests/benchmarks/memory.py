"""The memory of a full run: attempts in flight, those that wait on disk, and a minibatch on its way to the trainer.

    python tests/benchmarks/memory.py [--clients 8] [--attempts 16] [--tokens 131072]

Goal: under 1.5 GB with 8 clients x 64 attempts in flight at 131,072 tokens each, finished ones on disk; all of them take
three minutes, by `--attempts 64`. Real are the rollouts, the policy's client, the `tinker` SDK and the files; a server
in a process of its own answers (sink.py). Simulated are the sandboxes, and the tokenizer where it encodes what they
print: 2 turns of a prompt, 8,000 sampled tokens and some 180,000 characters of output, which become ids that are spread
over 248,000. The server keeps the last request of each attempt until its memory was read. RSS is this process's own, in
MB of 10^6 bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil

from swegym_tutorial import TrainingConfig, load_tasks, rollout
from swegym_tutorial.attempts import AttemptRunner, Identity
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.events import RunFolder
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.halt import Halt
from swegym_tutorial.minibatch import Group
from swegym_tutorial.policy import PolicyService
from swegym_tutorial.rollout import Chat
from swegym_tutorial.sandbox import CommandResult

TURNS, SAMPLED, VOCABULARY = 2, 8000, 248_000
CHARACTERS = 3.2  # a token, in code and what commands print
KEY = "tml-memory"
CALL = "</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls -R\n</parameter>\n</function>\n</tool_call>"


def rss() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


class Peak:
    """The highest RSS since it was made, looked at 50 times a second."""

    def __init__(self) -> None:
        self.value, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        process = psutil.Process()
        while not self._over.wait(0.02):
            self.value = max(self.value, process.memory_info().rss / 1e6)

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self.value


class Server:
    """The server's process, and what is asked of it beside the SDK's calls."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("sink.py"))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def tell(self, **what: Any) -> dict[str, int]:
        """Set what it answers with; returns how many requests it has had, and how many it keeps."""
        request = Request(
            f"{self.url}/script", json.dumps(what).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def until(self, kept: int) -> None:
        deadline = time.monotonic() + 600
        while self.tell()["kept"] < kept:
            assert time.monotonic() < deadline, "the attempts do not come to their last request"
            time.sleep(0.2)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class WideChat(Chat):
    """A chat whose long texts become ids spread as in a large vocabulary: the bundled tokenizer has a small one."""

    def encode(self, text: str) -> list[int]:
        if len(text) < 20_000:
            return super().encode(text)
        draw = np.random.default_rng(len(text))
        return (draw.zipf(1.2, int(len(text) / CHARACTERS)) * 7919 % VOCABULARY).tolist()


class Printing:
    """Sandboxes in which each command prints much."""

    name = "printing"

    def __init__(self, characters: int) -> None:
        self._text = "".join(chr(32 + n % 95) for n in range(characters - 1))

    def open(self, task: Any) -> Printing:
        return self

    def exec(self, command: str, **limits: Any) -> CommandResult:
        return CommandResult(0, self._text + chr(32 + threading.get_ident() % 95), False, 0, 0.1)

    def close(self) -> None:
        pass


class Grades:
    """A grader that has every second attempt resolved."""

    def __init__(self) -> None:
        self._count = 0

    def grade(self, task: Any, patch: bytes) -> Verdict:
        self._count += 1
        outcome = Outcome.RESOLVED if self._count % 2 else Outcome.UNRESOLVED
        return Verdict(outcome, {f"tests/test_{n}.py::test": "PASSED" for n in range(300)}, log="." * 50_000)


class Setting:
    """A run's parts around a server of its own."""

    def __init__(self, tokens: int, folder: Path) -> None:
        from transformers import AutoTokenizer

        rollout.prepare = lambda *args: None  # type: ignore[assignment]
        rollout._patch_of = lambda *args: b"a patch" * 100  # type: ignore[assignment]
        self.server, self.halt = Server(), Halt()
        self.config = replace(
            TrainingConfig.spindle(), context_tokens=2 * tokens, base_model="kept", observation_chars=10**6
        )
        self.chat = WideChat(AutoTokenizer.from_pretrained(POLICY), self.config.system_prompt)
        think = self.chat.encode("the " * 3 * SAMPLED)[: SAMPLED - len(self.chat.encode(CALL)) - 1]
        turn = [*think, *self.chat.encode(CALL), *self.chat.stop_tokens]
        self.server.tell(turn=turn, final=self.chat.encode("Done.") + self.chat.stop_tokens)
        self.service = PolicyService(self.config, (self.server.url, KEY), self.halt)
        self.service.stop_tokens = self.chat.stop_tokens
        printed = int((tokens - 700 - TURNS * SAMPLED) / TURNS * CHARACTERS)
        self.server.tell(keep=tokens - 2 * SAMPLED, last=tokens - 2 * SAMPLED)
        self.folder = RunFolder(folder)
        self.folder.open()
        self.attempts = AttemptRunner(
            self.chat, Printing(printed), Grades(), self.folder, self.config  # type: ignore[arg-type]
        )  # fmt: skip
        self.task = load_tasks()[0]

    def begin(self, part: int, client: int, count: int) -> tuple[list[Episode], list[threading.Thread]]:
        """Have a client make so many attempts side by side; returns where they come in, and the threads."""
        sampler, done = self.service.sampler("tinker://m/sampler_weights/p"), []

        def one(n: int) -> None:
            identity = Identity(f"run-{part}", f"train-job{client}", n // 8, n % 8, self.task.instance_id, 0)
            made = self.attempts.rollout(self.task, sampler, identity, self.halt)
            assert made is not None
            episode = self.attempts.grade(self.task, made, identity, self.halt)
            assert episode is not None
            done.append(episode)

        threads = [threading.Thread(target=one, args=(n,), daemon=True) for n in range(count)]
        for thread in threads:
            thread.start()
        return done, threads

    def close(self) -> None:
        self.halt.set()
        self.service.close()
        self.server.close()
        self.folder.close()


@contextmanager
def setting(tokens: int) -> Iterator[Setting]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        closing(Setting(tokens, Path(folder))) as made,
    ):
        yield made


def all_in(parts: list[tuple[list[Episode], list[threading.Thread]]]) -> list[Episode]:
    for _, threads in parts:
        for thread in threads:
            thread.join()
    return [episode for done, _ in parts for episode in done]


def in_flight(args: argparse.Namespace) -> dict[str, float]:
    """Attempts in flight; then as many finished; then as many in flight beside those."""
    count = args.clients * args.attempts
    with setting(args.tokens) as run:
        run.service.sampler("tinker://m/sampler_weights/p").sample([1, 2, 3], 4, None)
        told = {"before anything": rss()}
        peak = Peak()
        parts = [run.begin(0, client, args.attempts) for client in range(args.clients)]
        run.server.until(count)
        told["in flight"], told["in flight, peak"] = rss(), peak.stop()
        run.server.tell(keep=10**9)
        peak = Peak()
        episodes = all_in(parts)
        assert len(episodes) == count and {e.verdict.outcome for e in episodes} <= {*Outcome}
        told["finished and waiting"], told["finishing, peak"] = rss(), peak.stop()
        if args.again:
            run.server.tell(keep=args.tokens - 2 * SAMPLED)
            parts = [run.begin(1, client, args.attempts) for client in range(args.clients)]
            run.server.until(count)
            told["in flight again, beside the finished"] = rss()
        del episodes
        return told


def minibatch(args: argparse.Namespace) -> dict[str, float]:
    """Eight groups of eight finished attempts on their way to the trainer, for one client."""
    from swegym_tutorial import batches
    from swegym_tutorial.minibatch import Fate

    with setting(args.tokens) as run:
        run.server.tell(keep=10**9)
        episodes = all_in([run.begin(0, 0, 64)])
        groups = [Group(n, "t", 0, tuple(episodes[8 * n : 8 * n + 8])) for n in range(8)]
        del episodes
        client = run.service.client(0)
        client.begin()
        told = {"64 finished attempts": rss()}
        batch, peak = batches.Batch(0.0), Peak()
        base = run.service.base_sampler()
        asked = batches.References(base, run.config, "train-job0", run.folder.log)
        for group in groups:
            asked.expect(group)
            asked.ask(group.number)
            batch.take(group, Fate.KEPT, asked.take(group, Fate.KEPT))
        for each in batch.references.values():
            for answer in each:
                answer.result()
        told["their references answered"], told["asking, peak"] = rss(), peak.stop()
        peak = Peak()
        data = batch.minibatch(range(8), 1e-4, run.folder.log)
        told["the minibatch prepared"] = rss()
        run.server.tell(keep=0)
        forward = client._trainer.forward_backward(data, "ppo")
        del data
        run.server.until(1)
        time.sleep(3)
        told["submitted and waited for"], told["preparing and submitting, peak"] = rss(), peak.stop()
        del forward
        return told


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "attempts": in_flight,
    "minibatch": minibatch,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--attempts", type=int, default=16, help="of each client, side by side")
    parser.add_argument("--tokens", type=int, default=131_072, help="of each attempt")
    parser.add_argument(
        "--again", action="store_true", help="also make all of them anew beside the finished ones"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(STAGES[args.stage](args)))
        return
    print(
        f"{args.clients} clients x {args.attempts} attempts of {args.tokens:,} tokens\n\n| stage | what | RSS, MB |\n|---|---|---|"
    )
    for stage in STAGES:  # each in a process of its own, with nothing of another's in its memory
        began = time.monotonic()
        out = subprocess.run(
            [sys.executable, __file__, "--stage", stage, *sys.argv[1:]], stdout=subprocess.PIPE, check=True
        )
        for what, value in json.loads(out.stdout.splitlines()[-1]).items():
            print(f"| {stage} | {what} | {value:,.0f} |")
        print(f"| {stage} | seconds | {time.monotonic() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
