"""What a side effect costs: a fixed penalty, or the multiplier of a constraint."""

import pytest
from helpers import Echo, make_episode, make_task, play_one, says, script
from scipy.special import betaincinv

from agentrl.errors import ConfigError, ContractError
from agentrl.safety.settings import SafetySettings
from agentrl.safety.writes import WriteSet
from agentrl.specs import VerifierSpec
from agentrl.trainers.config import check_config
from agentrl.trainers.observe.metrics import safety_metrics
from agentrl.trainers.price import SideEffectPrice
from agentrl.trajectory import CallEvent, Counts, Group
from agentrl.types import EndReason
from agentrl.verifiers.base import Submission
from agentrl.verifiers.shaping import side_effect_penalty


def round_of(*effects, size=1):
    """One episode for each of `effects`, `size` of them a task."""
    episodes = [
        make_episode(1.0, task=f"task-{n // size}", sample=n % size, side_effects=one)
        for n, one in enumerate(effects)
    ]
    return [Group(tuple(each)) for each in zip(*[iter(episodes)] * size, strict=True)]


def test_a_fixed_penalty_stays():
    fixed = SideEffectPrice(SafetySettings(penalty=0.2))
    fixed.observe(round_of({"a": "added"}, {}))
    assert fixed.value == 0.2 and fixed.metrics() == {"safety/penalty": 0.2}
    assert SideEffectPrice(SafetySettings()).metrics() == {}
    assert SideEffectPrice(SafetySettings(penalty=0.2), (0.7, 0.7)).value == 0.2


CLEAN, CHANGED = {}, {"a": "added"}


def test_a_multiplier_follows_the_upper_bound_of_the_rate():
    """Clopper and Pearson's one-sided bounds: 2 of 100 is 0.06162, 20 of 100 is 0.27728."""
    price = SideEffectPrice(SafetySettings(at_most=0.1))
    seen = [(price.value, price.integral)]
    for changed in (2, 20):
        price.observe(round_of(*[CHANGED] * changed, *[CLEAN] * (100 - changed)))
        seen.append((price.value, price.integral))
    bounds = [betaincinv(hits + 1, 100 - hits, 0.95) for hits in (2, 20)]
    low, high = 1 + 0.5 * (bounds[0] - 0.1), 1 + 0.5 * (sum(bounds) - 0.2)
    assert seen[0] == (2.0, 1.0)  # before the first round nothing is known
    assert seen[1] == pytest.approx((low, low), abs=1e-5)
    assert seen[2] == pytest.approx((2.0, high), abs=1e-5)  # 10 (0.277 - 0.1) is over the cap


def test_the_bound_is_over_tasks():
    """25 tasks whose four episodes end alike say as much as 25 episodes."""
    clustered, single = (SideEffectPrice(SafetySettings(at_most=0.9)) for _ in range(2))
    clustered.observe(round_of(*[CHANGED] * 20, *[CLEAN] * 80, size=4))
    single.observe(round_of(*[CHANGED] * 5, *[CLEAN] * 20))
    assert clustered.integral == pytest.approx(single.integral)


def test_a_multiplier_stays_where_nothing_was_measured_and_between_its_ends():
    price = SideEffectPrice(SafetySettings(penalty=0.2, at_most=0.1))
    price.observe(round_of(None, None))
    assert (price.value, price.integral) == (2.0, 0.2)
    for _ in range(40):
        price.observe(round_of(*[CLEAN] * 100))
    assert (price.value, price.integral) == (0.0, 0.0)
    price.observe(round_of(*[CHANGED] * 12, *[CLEAN] * 88))
    assert price.value > 0.8, "what was forgotten is back in one round"
    for _ in range(40):
        price.observe(round_of(*[CHANGED] * 100))
    assert (price.value, price.integral) == (2.0, 2.0)


def test_a_bound_that_no_round_can_be_seen_to_hold_is_told():
    """The upper end at none of T tasks is 1 - 0.05^(1/T): 0.0894 of 32, 0.0295 of 100."""
    price = SideEffectPrice(SafetySettings(at_most=0.05))
    assert price.warning(100) == ""
    assert price.warning(32).endswith(
        "is 0.089, so the penalty only rises, up to 2: set at_most above 0.089, or play at least 59"
        " (tasks_per_step)"
    )
    assert price.warning(59) == "" and price.warning(58)
    assert SideEffectPrice(SafetySettings(at_most=0.0)).warning(32).endswith("above 0.089")
    assert SideEffectPrice(SafetySettings(penalty=0.5)).warning(1) == ""
    price.observe(round_of(*[CLEAN] * 32))
    assert price.integral > 1, "and rises it does"


def test_a_checkpoint_keeps_the_multiplier():
    price = SideEffectPrice(SafetySettings(at_most=0.1))
    price.observe(round_of(*[CLEAN] * 100))
    again = SideEffectPrice(SafetySettings(at_most=0.1), (price.value, price.integral))
    for one in (price, again):
        one.observe(round_of(*[CHANGED] * 5, *[CLEAN] * 95))
    assert (price.value, price.integral) == (again.value, again.integral)


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
        priced(price, Drawer), script(says(content="yes")), make_task(hidden={"answer": "yes"})
    )
    assert episode.reward == pytest.approx(0.7) and episode.passed
    assert episode.score.parts["shaping/side_effects"] == pytest.approx(-0.3)
    assert episode.side_effects == {"state:pen": "state added"}


def priced(price, make):
    def build():
        env = make()
        env.verifier = VerifierSpec(side_effect_price=price.value).build(env.verifier)
        return env

    return build


def test_what_nobody_measures_has_no_price():
    submission = Submission(make_task(), (), EndReason.ANSWERED)
    with pytest.raises(ContractError, match="set its writes"):
        side_effect_penalty(lambda: 0.1)(submission)


@pytest.mark.parametrize("settings", [{"penalty": 0.3}, {"at_most": 0.1}])
def test_a_run_whose_environment_declares_no_writes_ends_with_that_sentence(settings):
    price = SideEffectPrice(SafetySettings(**settings))
    task = make_task(hidden={"answer": "yes"})
    with pytest.raises(ContractError, match=r"safety\.penalty and safety\.at_most need an env"):
        play_one(priced(price, Echo), script(says(content="yes")), task)


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
