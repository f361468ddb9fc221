"""Ready judges: reward functions that ask a model, named without a file as ``judge:rubric``.

============ ===========================================================================
`Rubric`     rates a response by a list of criteria, of the row or of the options
`Equality`   compares the final answer with the reference
`Panel`      rates how helpful a response is, by several judges
`Cascade`    asks a rule, then a small model, then a large one
`Spot`       has a cheap model score, and a strong one check a random share
============ ===========================================================================

All take the arguments of `Asker`. Their prompts are in ``reward_loop/judges/prompts/``; ``prompt`` replaces them.
"""

from __future__ import annotations

from reward_loop.judges.asker import Asker
from reward_loop.judges.pointwise import Cascade, Criterion, Equality, Panel, Rubric, Spot

__all__ = ["Asker", "Cascade", "Criterion", "Equality", "Panel", "Rubric", "Spot"]
