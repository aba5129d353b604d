"""The synchronous plan is the base trainer itself; here it gets its name."""

from skyasync.plans import PLANS
from skyasync.trainer import RayPPOTrainer

PLANS.register("sync")(RayPPOTrainer)
