"""Faults at random moments from a seed: for real, on a training run of yours, or for all plans on virtual time.

python -m tests.chaos --every 30 --minutes 60 --seed 1 -- key=value ...
python -m tests.chaos --virtual --schedules 10000
"""

from tests.chaos.events import KINDS, Event, Kind, endless, schedule

__all__ = ["KINDS", "Event", "Kind", "endless", "schedule"]
