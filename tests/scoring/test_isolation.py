import pickle

from reward_loop.processes import worker
from reward_loop.scoring.isolation import SplitSemaphore


def test_a_semaphore_is_split_among_processes(monkeypatch):
    monkeypatch.setattr(worker, "processes", 3)
    for count, share in ((7, 2), (2, 1)):
        copy = pickle.loads(pickle.dumps(SplitSemaphore(count)))
        assert [copy.acquire(blocking=False) for _ in range(share + 1)] == [True] * share + [False]
