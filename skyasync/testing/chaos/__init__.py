"""Faults at random moments from a seed: for real, on a training run of yours, or for all plans on virtual time.

python -m skyasync.testing.chaos --every 30 --minutes 60 --seed 1 -- key=value ...
python -m skyasync.testing.chaos --virtual --schedules 10000
"""

from skyasync.testing.chaos.events import KINDS, Event, Kind, endless, schedule

__all__ = ["KINDS", "Event", "Kind", "endless", "schedule"]
