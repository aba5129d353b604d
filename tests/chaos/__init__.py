"""Random faults from a seed: in a real training run, or in simulated runs of all plans.

python -m tests.chaos --every 30 --minutes 60 --seed 1 -- key=value ...
python -m tests.chaos --virtual --schedules 10000
"""

from tests.chaos.events import KINDS, Event, Kind, endless, schedule

__all__ = ["KINDS", "Event", "Kind", "endless", "schedule"]
