from reward_loop.agent.journal import Entry, Journal


def reward(score):
    return {"reward_score": score, "reward_extra_info": {}}


def journal_of(*names, size=2):
    journal = Journal()
    journal.replace({}, ((), {}))
    for name in names:
        assert journal.submitted(name, Entry(data=[None] * 2 * size, group_size=size))
    return journal


def test_entries_that_arrive_twice_count_once():
    journal = journal_of("a")
    assert journal.ended({"a": {0: reward(1)}})
    assert journal.ended({"a": {0: reward(5), 1: reward(2)}})
    for _ in range(2):
        assert journal.handed_out("a", "call", [0], {0: reward(10), 1: reward(20)})
    assert journal.submitted("a", Entry(data=[], group_size=1))
    (entry,) = journal.entries().values()
    assert entry.handed_out == [0]
    assert entry.rewards == {0: reward(10), 1: reward(20)}
    # What was handed out stays, also when a note about its samples comes late.
    assert journal.ended({"a": {0: reward(1)}})
    assert entry.rewards[0] == reward(10)


def test_the_last_batch_that_was_handed_out_is_kept_for_a_call_that_is_made_again():
    journal = journal_of("a", "b", "c")
    journal.handed_out("a", "1", [1, 0], {})
    assert list(journal.entries()) == ["a", "b", "c"]
    journal.handed_out("b", "2", [0], {})
    assert list(journal.entries()) == ["a", "b", "c"]
    journal.handed_out("b", "3", [1], {})
    assert list(journal.entries()) == ["b", "c"]
    assert journal.entries()["b"].handed_out == [0, 1]


def test_an_unknown_batch_is_reported():
    assert not Journal().submitted("a", Entry(data=[None], group_size=1))
    assert not Journal().ended({"a": {0: reward(1)}})
    assert not Journal().handed_out("a", "call", [0], {})
    journal = journal_of("a")
    assert journal.dropped("a")
    assert not journal.dropped("a")
    assert Journal().arguments() is None


def test_starts_are_counted_until_one_comes_to_a_new_reward():
    journal = journal_of("a")
    assert [journal.started() for _ in range(2)] == [1, 2]
    journal.ended({"a": {0: reward(1)}})
    assert [journal.started() for _ in range(2)] == [1, 2]
    # What was judged again, and batches that are submitted again, are nothing new.
    journal.ended({"a": {0: reward(1)}})
    journal.submitted("b", Entry(data=[None], group_size=1))
    assert journal.started() == 3
    journal.handed_out("a", "call", [0], {})
    assert journal.started() == 1
