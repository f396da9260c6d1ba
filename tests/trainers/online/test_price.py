"""What a side effect costs: a fixed penalty, or the multiplier of a constraint."""

import pytest
from helpers import Echo, make_episode, make_task, play_one, says, script

from agentrl.errors import ConfigError, ContractError
from agentrl.safety.settings import SafetySettings
from agentrl.safety.writes import WriteSet
from agentrl.trainers.config import check_config
from agentrl.trainers.observe.metrics import safety_metrics
from agentrl.trainers.online.price import SideEffectPrice
from agentrl.trajectory import CallEvent, Counts, Group
from agentrl.types import EndReason
from agentrl.verifiers.base import Submission
from agentrl.verifiers.shaping import side_effect_penalty


def round_of(*effects):
    episodes = [make_episode(1.0, sample=n, side_effects=one) for n, one in enumerate(effects)]
    return [Group(tuple(episodes))]


def test_a_fixed_penalty_stays_and_a_multiplier_follows_the_rate():
    fixed = SideEffectPrice(SafetySettings(penalty=0.2))
    fixed.observe(round_of({"a": "added"}, {}))
    assert fixed.value == 0.2 and fixed.metrics() == {"safety/penalty": 0.2}
    moving = SideEffectPrice(SafetySettings(penalty=0.2, at_most=0.1))
    seen = []
    for effects in ([{"a": "added"}, {}], [{"a": "added"}] * 2, [{}, {}], [None, None]):
        moving.observe(round_of(*effects))
        seen.append(moving.value)
    assert seen == pytest.approx([0.4, 0.85, 0.8, 0.8])  # 0.2 + 0.5 (rate - 0.1); unmeasured: as is
    for _ in range(30):
        moving.observe(round_of({"a": "added"}))
    assert moving.value == 1.0
    assert SideEffectPrice(SafetySettings(at_most=0.1)).value == 1.0  # from 0 it comes too late
    assert SideEffectPrice(SafetySettings(at_most=0.1), 0.7).value == 0.7  # from a checkpoint
    assert SideEffectPrice(SafetySettings()).metrics() == {}


def test_the_penalty_moves_the_reward_and_never_the_verdict():
    class Drawer(Echo):
        writes = WriteSet()

        async def setup(self):
            self.things = {}

        def state(self):
            return self.things

        async def on_text(self, message):
            self.things["pen"] = 1
            return await super().on_text(message)

    price = SideEffectPrice(SafetySettings(penalty=0.3))
    episode = play_one(
        price.around(Drawer), script(says(content="yes")), make_task(hidden={"answer": "yes"})
    )
    assert episode.reward == pytest.approx(0.7) and episode.passed
    assert episode.score.parts["shaping/side_effects"] == pytest.approx(-0.3)
    assert episode.side_effects == {"state:pen": "state added"}
    assert SideEffectPrice(SafetySettings()).around(Drawer) is Drawer


def test_what_nobody_measures_has_no_price():
    submission = Submission(make_task(), (), EndReason.ANSWERED)
    with pytest.raises(ContractError, match="set writes"):
        side_effect_penalty(lambda: 0.1)(submission)


def test_rates_are_told_apart_from_success_and_left_out_where_nobody_looked():
    event = CallEvent(1, 1, "pay", "irreversible", "deny", "r")
    denied = make_episode(1.0, events=(event,), counts=Counts(denied=1), side_effects={})
    changed = make_episode(1.0, side_effects={"a": "added"})
    assert safety_metrics([denied, changed, make_episode(1.0)]) == {
        "side_effects/rate": 0.5,
        "safety/denied_rate": 1.0,
    }
    assert safety_metrics([make_episode(1.0)]) == {}


@pytest.mark.parametrize("row", [{"penalty": 2.0}, {"at_most": 1.5}, {"polcy": "x"}])
def test_wrong_settings_get_a_sentence(row):
    with pytest.raises(ConfigError, match=next(iter(row))):
        check_config({"env": "calc-v0", "model": "m", "safety": row}, "c.toml")
