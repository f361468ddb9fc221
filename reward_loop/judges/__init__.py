"""Ready judges: reward functions that ask a model, named without a file as ``judge:rubric``.

============ ===========================================================================
`Rubric`     rates a response by a list of criteria, of the row or of the options
`Equality`   compares the final answer with the reference
============ ===========================================================================

All take the arguments of `Asker`. Their prompts are in ``reward_loop/judges/prompts/``; ``prompt`` replaces them.
"""

from __future__ import annotations

from reward_loop.judges.asker import Asker
from reward_loop.judges.pointwise import Criterion, Equality, Rubric

__all__ = ["Asker", "Criterion", "Equality", "Rubric"]
