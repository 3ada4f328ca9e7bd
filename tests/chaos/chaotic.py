"""A training run in this process in the midst of everything that can break: calls, the server, sandboxes, pauses."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swegym_tutorial import TrainingConfig, TrainingRun
from swegym_tutorial.sandbox.local import LocalBackend

from . import checks, leaks
from .history import attempt_of, history, jobs, read_log, training_attempts
from .proxy import ChaosProxy, Rates, chaos_proxy
from .sandboxes import ChaoticBackend, Shares
from .server import MortalServer

CLOSING = 90.0  # seconds in which all of a run must be gone; 30 are promised on a machine of one's own


@dataclass
class Result:
    """What one chaotic run did, and what was found wrong with it."""

    folder: Path
    injected: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    attempts_lost: int = 0
    batches: int = 0
    batches_lost: int = 0
    recovered: int = 0
    wrong: list[str] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)  # processes, folders and threads that were left
    left_words: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Meddling:
    """How often, in seconds on average, things are done to the run and its server; 0: never."""

    restart_every: float = 0.0
    pause_every: float = 0.0
    pause_seconds: float = 5.0


class World:
    """A server that can be killed and a proxy before it, for one run after the other."""

    def __init__(self, server: MortalServer, proxy: ChaosProxy) -> None:
        self.server, self.proxy = server, proxy
        self._lock = threading.Lock()

    @property
    def address(self) -> tuple[str, str]:
        return self.proxy.url, self.server.key

    def restart_server(self, pause: float = 0.0) -> None:
        """Kill the server and start it again on its checkpoints; the proxy's address stays."""
        with self._lock:
            self.server.restart(pause)
            self.proxy.target = self.server.url


@contextmanager
def world(state: Path, rates: Rates, seed: int = 0) -> Iterator[World]:
    server = MortalServer(state)
    with ExitStack() as closing:
        closing.callback(server.kill)
        server.start()
        proxy = closing.enter_context(chaos_proxy(server.url, rates, seed))
        yield World(server, proxy)


def run_in(
    place: World,
    config: TrainingConfig,
    folder: Path,
    shares: Shares,
    *,
    seed: int = 0,
    meddling: Meddling | None = None,
    limit: float = 900.0,
    say: Callable[[str], None] = lambda text: None,
) -> Result:
    """Make one run, and look at what it did and what it left. limit: seconds until it is stopped, and that told."""
    result = Result(folder)
    calls, kills = Counter(place.proxy.injected), place.server.kills
    threads = threading.enumerate()
    with leaks.temporary_place() as temp:
        sandboxes = LocalBackend(temp, memory_mb=config.sandbox_memory_mb, processes=config.sandbox_processes)
        chaotic = ChaoticBackend(sandboxes, config, shares, seed)
        run = TrainingRun(config, folder, server=place.address, sandboxes=chaotic)
        run.start()
        over = threading.Event()
        meddler = threading.Thread(
            target=_meddle, args=(place, run, meddling or Meddling(), seed, over, result, say), name="meddler"
        )
        meddler.start()
        try:
            if not run.join(limit):
                result.wrong.append(f"the run was not done within {limit:.0f} s")
                run.stop()
            run.wait()
        except Exception as error:
            result.wrong.append(f"the run failed: {type(error).__name__}: {error}")
        finally:
            over.set()
            meddler.join()
        if not run.closed(CLOSING):
            result.wrong.append(f"the run was not closed within {CLOSING:.0f} s")
        result.injected += place.proxy.injected - calls
        result.injected += Counter({f"sandbox {kind}": count for kind, count in chaotic.injected.items()})
        result.injected["server kill -9"] += place.server.kills - kills
        _look_for_leaks(result, temp, threads)
    _look_at_folder(result, config)
    return result


def _meddle(
    place: World,
    run: TrainingRun,
    meddling: Meddling,
    seed: int,
    over: threading.Event,
    result: Result,
    say: Callable[[str], None],
) -> None:
    """Restart the server and pause the run, each at its times, until the run is over."""
    chance = random.Random(f"meddling {seed}")

    def soon(every: float) -> float:
        return chance.uniform(0.5, 1.5) * every if every else float("inf")

    restart, pause = soon(meddling.restart_every), soon(meddling.pause_every)
    while not over.wait(min(restart, pause, 3600)):
        if restart <= pause:
            pause -= restart
            say("the server is killed and started again")
            place.restart_server(chance.uniform(0, 5))
            restart = soon(meddling.restart_every)
        else:
            restart -= pause
            run.pause()
            over.wait(chance.uniform(0.3, 1) * meddling.pause_seconds)
            run.resume()
            result.injected["pause"] += 1
            pause = soon(meddling.pause_every)


def _look_for_leaks(result: Result, temp: Path, threads: list[threading.Thread]) -> None:
    found = {
        "processes": leaks.after_patience(lambda: leaks.processes(temp), CLOSING),
        "folders": leaks.after_patience(lambda: leaks.folders(temp), CLOSING),
        "threads": leaks.after_patience(lambda: leaks.threads(threads), CLOSING),
    }
    for kind, things in found.items():
        result.left[kind] += len(things)
        result.left_words += [f"{kind}: {thing}" for thing in things]


def _look_at_folder(result: Result, config: TrainingConfig) -> None:
    events, _ = read_log(result.folder)
    result.attempts = len({attempt_of(e) for e in training_attempts(events, "rollout_start")})
    result.attempts_lost = checks.lost_attempts(events)
    result.batches = sum(len(history(events, job).steps) for job in jobs(events))
    result.batches_lost = len(checks.lost_batches(events, config))
    result.recovered = sum(event["event"] == "recovered" for event in events)
    try:
        result.wrong += checks.all_of(result.folder, steps=config.steps)
    except (OSError, LookupError, ValueError) as error:
        result.wrong.append(f"the folder cannot be checked: {type(error).__name__}: {error}")
