import signal

from reward_loop._util import signals


def test_a_loop_that_closes_is_not_woken_by_signals():
    """Python would print an error when it cannot write to the descriptor that wakes the loop."""
    woken, generators = [], []

    async def until_the_loop_closes():
        try:
            yield
        finally:
            woken.append(signal.set_wakeup_fd(-1))

    async def main():
        generators.append(until_the_loop_closes())
        await anext(generators[0])

    signals.run(main())
    assert woken == [-1]
