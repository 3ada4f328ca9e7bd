"""When infrastructure faults end a client, and when they are waited out."""

from dataclasses import replace

import pytest

from swegym_tutorial import TrainingConfig
from swegym_tutorial.faults import Faults, TooManyFaults

CONFIG = replace(TrainingConfig.laptop(), fault_window=16, max_fault_share=0.5, fault_minutes=1.0)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("swegym_tutorial.faults.time.monotonic", lambda: now[0])
    return now


def test_a_trouble_that_lasts_ends_the_client_with_the_commonest_reasons(clock):
    faults = Faults("train-job3", CONFIG)
    for n in range(30):
        faults.lost("SandboxError: quota" if n % 3 else "PolicyError: 500")
    clock[0] = 61.0
    with pytest.raises(TooManyFaults) as caught:
        faults.lost("SandboxError: quota")
    told = str(caught.value)
    assert told.startswith("train-job3: 16 of the last 16 attempts were lost") and "for 1 min" in told
    assert "11 x SandboxError: quota; 5 x PolicyError: 500" in told


def test_a_trouble_that_passes_is_waited_out(clock):
    faults = Faults("job", CONFIG)
    for _ in range(16):
        faults.lost("no room")
    clock[0] = 50.0
    for _ in range(9):
        faults.ended()
    clock[0] = 500.0
    for _ in range(8):
        faults.lost("no room")  # the share has just passed the limit again: the minute begins anew
    clock[0] = 559.0
    faults.lost("no room")


def test_a_share_below_the_limit_never_ends_a_client(clock):
    faults = Faults("job", CONFIG)
    for n in range(400):
        clock[0] += 10.0
        faults.ended()
        faults.lost(f"fault {n}")


def test_a_few_attempts_say_nothing(clock):
    faults = Faults("job", replace(CONFIG, fault_window=64))
    for _ in range(7):
        clock[0] += 100.0
        faults.lost("no room")


def test_pauses_grow_while_attempts_are_lost_in_a_row():
    faults = Faults("job", CONFIG)
    assert 0.5 <= faults.pause(0) <= 1.0 and 1.0 <= faults.pause(1) <= 2.0
    for _ in range(16):
        faults.lost("no room")
    assert 8.0 <= faults.pause(0) <= 16.0
    for _ in range(100):
        faults.lost("no room")
    assert 30.0 <= faults.pause(9) <= 60.0
    faults.ended()
    assert faults.pause(0) <= 1.0
