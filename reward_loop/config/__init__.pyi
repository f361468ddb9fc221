# The options, each with the module that declares it; `__init__.py` reads this file.

from reward_loop.config.health import HealthConfig as HealthConfig
from reward_loop.config.parsing import Config as Config
from reward_loop.config.parsing import parse as parse
from reward_loop.limits.options import BudgetConfig as BudgetConfig
from reward_loop.limits.options import LimitConfig as LimitConfig
from reward_loop.limits.options import ModelConfig as ModelConfig
from reward_loop.limits.options import RetryConfig as RetryConfig
from reward_loop.managers.options import BatchConfig as BatchConfig
from reward_loop.managers.options import GroupConfig as GroupConfig
from reward_loop.managers.options import RewardLoopConfig as RewardLoopConfig
from reward_loop.records.options import RecordConfig as RecordConfig
from reward_loop.router.config import PolicyName as PolicyName
from reward_loop.serving.options import RewardModelConfig as RewardModelConfig
from reward_loop.serving.options import ServedModelConfig as ServedModelConfig
from reward_loop.types import Policy as Policy
