"""ROLL: settings and recipes.

``environment.env_class=my_file:MyEnv`` plays its environments, which have gem's methods.
"""

from skyasync.interop.system import System

SYSTEM = System("roll", "ROLL", order=3)
