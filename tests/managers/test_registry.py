import pytest

from reward_loop import ConfigError, NaiveRewardLoopManager, register
from reward_loop.managers import registry


@pytest.fixture(autouse=True)
def only_for_this_test(monkeypatch):
    monkeypatch.setattr(registry, "_managers", dict(registry._managers))


class WrittenForVerl:
    async def run_single(self, data):
        return {"reward_score": 1.0, "reward_extra_info": {}}


def test_a_class_of_the_users_own():
    assert register("mine")(WrittenForVerl) is WrittenForVerl
    assert registry.get("mine") is WrittenForVerl
    register("mine")(WrittenForVerl)


def test_by_import_path(tmp_path):
    assert registry.get("reward_loop.managers.builtin:NaiveRewardLoopManager") is NaiveRewardLoopManager
    path = tmp_path / "managers.py"
    path.write_text("class Mine:\n    async def run_single(self, data):\n        return {}\n")
    assert registry.get(f"{path}:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("niave", r"unknown reward manager 'niave'; did you mean 'naive'\? Known: .*naive.*import path"),
        ("zzz", r"unknown reward manager 'zzz'\. Known: "),
        ("no_such_package_here:Manager", "no module named"),
        ("json:dumps", "is not a reward manager: it must be a class"),
        ("reward_loop:RewardSample", "is not a reward manager: it must be a class"),
        ("limited", r"there is no reward manager 'limited': use `naive` with reward_loop\.limits\.default"),
        ("composite", r"reward_loop\.combine"),
        ("gdpo", "only the sum of a sample's rewards"),
    ],
)
def test_unknown_ended_and_invalid_managers_are_errors(name, message):
    with pytest.raises(ConfigError, match=message):
        registry.get(name)


def test_a_name_is_taken_once():
    with pytest.raises(ConfigError, match=r"'naive' is registered already: reward_loop\.managers\.builtin"):
        register("naive")(WrittenForVerl)


@pytest.mark.parametrize("name", ["", "pkg:Class"])
def test_invalid_manager_names_are_errors(name):
    with pytest.raises(ConfigError, match="invalid manager name"):
        register(name)
