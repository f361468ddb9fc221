# The names of this room for the others, each with its module; `__init__.py` reads this file.

from reward_loop.limits.local import REWARD_MODEL as REWARD_MODEL
from reward_loop.limits.local import FailureBound as FailureBound
from reward_loop.limits.local import Limits as Limits
from reward_loop.limits.local import LocalLimits as LocalLimits
from reward_loop.limits.local import Permit as Permit
