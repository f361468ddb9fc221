# The names of this room for the others, each with its module; `__init__.py` reads this file.

from reward_loop.processes.child import in_isolated_call as in_isolated_call
from reward_loop.processes.outcome import cause_of as cause_of
from reward_loop.processes.pool import usable_cores as usable_cores
