"""A process whose engine stands still ends; one that works, waits or was stopped does not."""

from __future__ import annotations

import queue
import subprocess
import sys
import time

from slipstream.watchdog import STATUS, Watchdog

STUCK = """
import logging, threading, time
from slipstream.watchdog import Watchdog

def stuck_in_a_step():
    time.sleep(60)

logging.basicConfig()
threading.Thread(target=stuck_in_a_step, daemon=True).start()
Watchdog(lambda: {"engine": "step 7"}, 0.2).start()
time.sleep(60)
"""


def test_a_process_that_stands_still_ends_and_shows_where() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == STATUS
    assert "stands still and is ended: engine: at step 7 for more than 0.2 s" in done.stderr
    assert "in stuck_in_a_step" in done.stderr


def test_only_who_is_at_the_same_for_too_long_is_ended() -> None:
    """Looks are 0.1 s apart: nobody is at the same in more than three of them, but the last."""
    quick = [{"quick": f"step {look}"} for look in range(30)]
    pauses = [{"pauses": "message 1"} if look % 3 else {} for look in range(30)]
    slow = [{"slow": f"step {look // 3}"} for look in range(30)]
    script = [{**a, **b, **c} for a, b, c in zip(quick, pauses, slow, strict=True)]
    looks, said = iter(script), queue.Queue[str]()
    last = {"slow": "step 10"}
    Watchdog(lambda: next(looks, last), 0.4, said.put).start()
    assert said.get(timeout=30) == "slow: at step 10 for more than 0.4 s"
    assert next(looks, None) is None
    time.sleep(0.5)
    assert said.empty()


def test_without_a_limit_nobody_looks() -> None:
    looks: queue.Queue[None] = queue.Queue()
    Watchdog(lambda: looks.put(None) or {}, 0.0).start()
    time.sleep(0.2)
    assert looks.empty()


def test_stopped_it_ends_nothing() -> None:
    said: queue.Queue[str] = queue.Queue()
    dog = Watchdog(lambda: {"engine": "step 1"}, 0.2, said.put)
    dog.start()
    dog.stop()
    time.sleep(0.5)
    assert said.empty()
