"""The documentation's pictures of the plans, drawn from what the plans' own classes did in
simulation.

    uv run -m benchmarks.plan_pictures [--out docs/pictures] [PLAN ...]

Writes plan-<name>.svg for each plan (by default the library's; module:Class draws a plan of yours).
All of them see the same responses on the same scale: 4 prompts of 2 samples per step, one engine of
8 slots, training as expensive as generation, 6 steps, max_staleness 2. A bar of the engine is a
response, its colour the policy version that computed the tokens; a bar of the trainer is a training
step; a vertical line is a weight sync.
"""

from __future__ import annotations

import argparse
import asyncio
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from skyasync.observability.timeline import Timeline
from skyasync.simulate.clock import run_virtual
from skyasync.simulate.engines import Sequence, VirtualEngine
from skyasync.simulate.run import make_trainer
from skyasync.simulate.settings import SimulationConfig
from skyasync.trainer.plans import PLANS

STEPS = 6
SLOTS = 8
# pixels; SCALE per second
WIDTH = 900
LEFT = 62
ROW = 15
BAR = 12
SCALE = 3.9
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756")
GREY = "#8a8a8a"  # readable on light and on dark
OUT = Path(__file__).parents[1] / "docs" / "pictures"


@dataclass
class Drawn:
    """What happened: responses as (slot, start, end), syncs as (time, version), trained steps as
    (start, end).

    An interrupted response has several bars; ``slots`` are of all engines, ``ended`` are the
    responses.
    """

    slots: int = 0
    ended: int = 0
    responses: list[tuple[int, float, float]] = field(default_factory=list)
    swaps: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    trained: list[tuple[float, float]] = field(default_factory=list)


class WatchedEngine(VirtualEngine):
    """A simulated engine that records which slot had which response when."""

    def __init__(self, engine: VirtualEngine, drawn: Drawn) -> None:
        super().__init__(engine.costs)
        self.drawn = drawn
        self._free = list(range(drawn.slots, drawn.slots + SLOTS))
        self._started: dict[int, tuple[int, float, Sequence]] = {}
        drawn.slots += SLOTS

    def _fill(self) -> None:
        super()._fill()
        self._draw()

    def cut(self) -> None:
        super().cut()
        self._draw()

    def _draw(self) -> None:
        now = asyncio.get_running_loop().time()
        running = {id(sequence) for *_, sequence in self._running}
        for key in self._started.keys() - running:
            slot, start, sequence = self._started.pop(key)
            self._free.append(slot)
            self.drawn.ended += sequence.done.done()
            self.drawn.responses.append((slot, start, now))
        for *_, sequence in sorted(self._running, key=_arrival):
            if id(sequence) not in self._started:
                self._free.sort()
                self._started[id(sequence)] = (self._free.pop(0), now, sequence)

    def set_version(self, version: int) -> None:
        super().set_version(version)
        if version:
            self.drawn.swaps.append((asyncio.get_running_loop().time(), version))


def _arrival(entry: tuple[float, int, Sequence]) -> int:
    return entry[1]


def configuration() -> SimulationConfig:
    """Small enough for a picture."""
    cfg = SimulationConfig()
    cfg.trainer.max_training_steps = STEPS
    cfg.trainer.train_batch_size = 4
    cfg.trainer.max_staleness = 2
    cfg.trainer.seed = 3
    cfg.generator.num_inference_engines = 1
    cfg.generator.n_samples_per_prompt = 2
    settings = cfg.simulate
    settings.slots = SLOTS
    settings.token_s = 1.0
    settings.prefill = 0.0
    settings.sync_s = 0.6
    settings.length_mean = 9.0
    settings.length_max = 22
    settings.length_sigma = 0.6
    settings.train_s_per_token = 0.14
    return cfg


def watch(plan: str) -> Drawn:
    """Run the plan's class in simulation."""
    drawn = Drawn()

    async def run() -> None:
        trainer = make_trainer(deepcopy(configuration()), PLANS.find(plan))
        client: Any = trainer.inference_engine_client
        client.engines[:] = [WatchedEngine(engine, drawn) for engine in client.engines]
        loop = asyncio.get_running_loop()
        trainer.context.phases.timeline = timeline = Timeline(None, clock=loop.time)
        await trainer.run()
        if any(span.name == "update" for span in timeline.spans()):
            work = "update"
        else:
            work = "train"
        drawn.trained += [
            (span.start_s, span.end_s) for span in timeline.spans() if span.name == work
        ]

    run_virtual(run())
    return drawn


def picture(name: str, drawn: Drawn) -> str:
    """The SVG of a run."""
    slots = drawn.slots
    height = (slots + 2) * ROW + 26
    end = max([end for *_, end in drawn.responses] + [end for _, end in drawn.trained])
    svg = ElementTree.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {height}", "role": "img",
                "font-family": "sans-serif", "font-size": "12", "fill": GREY}
    )  # fmt: skip
    _add(svg, "title", text=f"{name}: {end:.0f} s for {STEPS} steps")
    for place in range(SLOTS // 2, slots, SLOTS):
        _add(svg, "text", x=0, y=float(ROW * place + 4), text="engine")
    _add(svg, "text", x=0, y=ROW * (slots + 1) + 6, text="trainer")
    for slot, start, stop in sorted(drawn.responses):
        for version, begin, until in _by_version(drawn.swaps, start, stop):
            _bar(svg, slot * ROW, begin, until, COLOURS[version % len(COLOURS)])
    for start, stop in sorted(drawn.trained):
        _bar(svg, (slots + 0.6) * ROW, start, stop, GREY)
    for time, version in drawn.swaps[1:]:
        x = LEFT + time * SCALE
        _add(
            svg,
            "line",
            x1=x,
            x2=x,
            y1=0,
            y2=(slots + 1.6) * ROW,
            stroke=COLOURS[version % len(COLOURS)],
        )
        _add(svg, "text", x=x - 4, y=(slots + 1.6) * ROW + 13, text=f"v{version}")
    _add(svg, "text", x=LEFT + end * SCALE + 8, y=ROW * (slots + 1) + 6, text=f"{end:.0f} s")
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _by_version(
    swaps: list[tuple[float, int]], start: float, stop: float
) -> list[tuple[int, float, float]]:
    """The parts of a response by the version that computed them."""
    ends = [time for time, _ in swaps[1:]] + [float("inf")]
    parts = [
        (version, max(start, time), min(stop, until))
        for (time, version), until in zip(swaps, ends, strict=True)
    ]
    return [(version, begin, until) for version, begin, until in parts if until - begin > 1e-6]


def _bar(svg: ElementTree.Element, y: float, start: float, stop: float, colour: str) -> None:
    _add(
        svg,
        "rect",
        x=LEFT + start * SCALE,
        y=y,
        width=max((stop - start) * SCALE - 1, 0.5),
        height=BAR,
        fill=colour,
    )


def _add(svg: ElementTree.Element, tag: str, *, text: str = "", **attributes: object) -> None:
    written = {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()
    }
    ElementTree.SubElement(svg, tag, written).text = text or None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_pictures", description="Draw the plans."
    )
    parser.add_argument("plans", nargs="*", default=PLANS.names(), help="names or module:Class")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for plan in args.plans:
        name = plan.rpartition(":")[2]
        path = args.out / f"plan-{name}.svg"
        path.write_text(picture(name, watch(plan)))
        print(path)


if __name__ == "__main__":
    main()
