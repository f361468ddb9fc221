# The public names, each with its module: `__init__.py` reads this file, and imports a name on first use.

from reward_loop.agent import BlockingRewardAgent as BlockingRewardAgent
from reward_loop.agent import RewardAgent as RewardAgent
from reward_loop.agent.environment import score as score
from reward_loop.agent.environment import scorer as scorer
from reward_loop.config import RewardLoopConfig as RewardLoopConfig
from reward_loop.errors import BudgetSpentError as BudgetSpentError
from reward_loop.errors import ConfigError as ConfigError
from reward_loop.errors import FunctionLoadError as FunctionLoadError
from reward_loop.errors import IncompleteGroupError as IncompleteGroupError
from reward_loop.errors import InvalidScoreError as InvalidScoreError
from reward_loop.errors import LimitError as LimitError
from reward_loop.errors import RequestError as RequestError
from reward_loop.errors import RewardCrashedError as RewardCrashedError
from reward_loop.errors import RewardFunctionError as RewardFunctionError
from reward_loop.errors import RewardLoopError as RewardLoopError
from reward_loop.errors import RewardsCancelledError as RewardsCancelledError
from reward_loop.errors import RewardTimeoutError as RewardTimeoutError
from reward_loop.errors import ScoringError as ScoringError
from reward_loop.errors import ServerDiedError as ServerDiedError
from reward_loop.errors import ServerError as ServerError
from reward_loop.errors import ServerStartError as ServerStartError
from reward_loop.errors import TooManyFailuresError as TooManyFailuresError
from reward_loop.errors import TransientError as TransientError
from reward_loop.errors import UnscoredError as UnscoredError
from reward_loop.managers import NaiveRewardLoopManager as NaiveRewardLoopManager
from reward_loop.managers import RewardLoopManagerBase as RewardLoopManagerBase
from reward_loop.managers import register as register
from reward_loop.scoring import ScoringFunction as ScoringFunction
from reward_loop.scoring import combine as combine
from reward_loop.scoring import isolated as isolated
from reward_loop.scoring import limit as limit
from reward_loop.scoring import load_function as load_function
from reward_loop.serving import RewardModelManager as RewardModelManager
from reward_loop.types import ComputeScore as ComputeScore
from reward_loop.types import Outcome as Outcome
from reward_loop.types import Reward as Reward
from reward_loop.types import RewardResult as RewardResult
from reward_loop.types import RewardSample as RewardSample

__version__: str
