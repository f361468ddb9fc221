import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_loop import ConfigError
from reward_loop.agent.step_order import Generate, Prepare, StepOrder, Train, Wait


def actions(schedule, steps, ready=lambda step: 0, **options):
    """Run a schedule whose judge ends only when it is waited for, where ``ready`` does not say more."""
    waited = {}

    def so_far(step):
        return max(ready(step), waited.get(step, 0))

    done = []
    for action in schedule.actions(steps, so_far, **options):
        done.append(action)
        if isinstance(action, Wait):
            waited[action.step] = action.mini_batches
    return done


AHEAD = [Generate(0), Generate(1), Prepare(0), Wait(0, 1), Train(0, 0, 1), Prepare(1), Wait(1, 1), Train(1, 0, 1)]


@pytest.mark.parametrize(
    ("schedule", "steps", "ready", "expected"),
    [
        (StepOrder(2), 1, 0, [Generate(0), Wait(0, 2), Prepare(0), Train(0, 0, 2)]),
        (
            StepOrder(2, mini_batch_pipeline=True),
            1,
            0,
            [Generate(0), Prepare(0), Wait(0, 1), Train(0, 0, 1), Wait(0, 2), Train(0, 1, 1)],
        ),
        (
            StepOrder(4, mini_batch_pipeline=True),
            1,
            3,
            [Generate(0), Prepare(0), Train(0, 0, 3), Wait(0, 4), Train(0, 3, 1)],
        ),
        (StepOrder(1, one_step_off_policy=True), 2, 0, AHEAD),
    ],
    ids=["baseline", "mini-batches", "every complete mini-batch", "one step ahead"],
)
def test_the_order_of_a_step(schedule, steps, ready, expected):
    assert actions(schedule, steps, ready=lambda step: ready) == expected


def test_a_resumed_run_does_not_generate_again():
    schedule = StepOrder(1, one_step_off_policy=True)
    done = actions(schedule, 2, first_step=7, generated=True)
    assert [action for action in done if isinstance(action, Generate)] == [Generate(8)]
    done = actions(StepOrder(1), 2, first_step=7, generated=True)
    assert [action for action in done if isinstance(action, Generate)] == [Generate(8)]


@given(st.builds(StepOrder, st.integers(1, 5), st.booleans(), st.booleans()), st.integers(1, 5), st.randoms())
def test_each_part_happens_once_and_in_order(schedule, steps, rng):
    seen = {}

    def ready(step):
        seen[step] = rng.randint(seen.get(step, 0), schedule.mini_batches)
        return seen[step]

    generated, prepared, trained, waited = [], [], [], {}
    for action in schedule.actions(steps, lambda step: max(ready(step), waited.get(step, 0))):
        match action:
            case Generate(step):
                generated.append(step)
                assert step - len(set(trained)) <= schedule.one_step_off_policy + 1
            case Prepare(step):
                assert step in generated
                prepared.append(step)
            case Wait(step, wanted):
                waited[step] = wanted
            case Train(step, first, count):
                assert step in prepared
                assert trained.count(step) == first
                trained += [step] * count
    assert generated == prepared == list(range(steps))
    assert trained == [step for step in range(steps) for _ in range(schedule.mini_batches)]


def test_a_step_without_mini_batches_is_refused():
    with pytest.raises(ConfigError, match="mini_batches"):
        StepOrder(0)
