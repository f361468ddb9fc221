import pickle

import pytest

from reward_loop.scoring.isolation import SplitSemaphore


@pytest.mark.parametrize(("count", "share"), [(7, 2), (2, 1)])
def test_a_semaphore_is_split_among_processes(count, share):
    copy = pickle.loads(pickle.dumps(SplitSemaphore(count, processes=3)))
    assert [copy.acquire(blocking=False) for _ in range(share + 1)] == [True] * share + [False]
