# The public names of this package, each with its module; `__init__.py` reads this file.

from reward_loop.serving.manager import RewardModelManager as RewardModelManager
from reward_loop.serving.manager import serve_reward_model as serve_reward_model
