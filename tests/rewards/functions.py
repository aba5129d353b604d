"""Reward functions as users write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time


def length(prompt, response, label):
    return len(response) / 10


def everything(prompt, response, label, **extra):
    return {"reward": 1.0, "prompt_length": len(prompt), "columns": len(extra)}


def scored(response):
    return {"score": 0.5}


async def slow_server(response):
    await asyncio.sleep(0.2)
    return 1.0


five = asyncio.Barrier(5)


async def waits_for_four_others(response):
    await five.wait()
    return 1.0


def returned(response, value):
    return {"nan": float("nan"), "text": "good", "none": None, "true": True, "empty": {}, "rewrd": {"rewrd": 1.0},
            "metric": {"reward": 1.0, "why": "good"}, "list": [1.0]}[value]  # fmt: skip


async def async_text(response):
    return "good"


def raises(response):
    raise ZeroDivisionError("no words to divide by")


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_its_own(response):
    raise Unpicklable("this", "that")


async def raises_later(response):
    raise ZeroDivisionError("no words to divide by")


async def raises_its_own_timeout(response):
    raise TimeoutError("the server said so")


def leaves_later(response):
    threading.Timer(0.1, os._exit, [3]).start()
    return 1.0


def leaves_a_thread(response):
    threading.Thread(target=time.sleep, args=[1000]).start()
    return {"reward": 0.0, "process": os.getpid()}


def hangs(response):
    if "hang" in response:
        time.sleep(1000)
    return 1.0


def waits(response):
    """Until a file exists; first records that it has begun."""
    response.with_name("begun").touch()
    while not response.exists():
        time.sleep(0.01)
    return 1.0


def holds_the_interpreter(response):
    return float(9**9**9 > 1) if "hang" in response else 1.0


async def hangs_politely(response):
    await asyncio.sleep(1000)
    return 1.0


def hangs_or_exits(response):
    hangs(response)
    leaves(response)
    return 1.0


def hangs_or_exits_at_random(response):
    return hangs_or_exits(random.choice(["hang", "leave", "well"]))


def leaves(response):
    if "leave" in response:
        os._exit(3)
    if "exit" in response:
        raise SystemExit
    return 1.0


def process(response):
    return {"reward": 0.0, "process": os.getpid()}


def uses_signals(response):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(0)
    return float(threading.current_thread() is threading.main_thread())


def needs_more(response, lable):
    return 1.0


def by_position(response, /):
    return 1.0


def reads(text):
    if text == "hang":
        time.sleep(1000)
    return {"reward": 1.0, "length": len(text)} if text == "good" else None


not_a_function = 3
