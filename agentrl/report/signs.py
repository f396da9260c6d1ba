"""Warning signs in a run's metrics: sentences for a reader, which decide nothing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]

WINDOW = 5
"""Steps that are averaged at the start and at the end of a run."""

NO_SIGNAL_SHARE = 0.7
ENTROPY_SHARE = 0.2
LENGTH_FACTOR = 2.0
CLIP_SHARE = 0.3
PARITY_NATS = 0.01
REWARD_JUMP = 0.3
"""Smallest jump worth a warning, as a share of the range of rewards: 1, or four standard deviations
of a round where a reward exceeds 1.
"""
FALSE_JUMPS = 0.05
JUMP_ROUNDS = 50
"""At most a share `FALSE_JUMPS` of runs with `JUMP_ROUNDS` rounds warn of a jump although nothing
changes.
"""
REWARD_GAIN = 0.1
HELD_OUT_GAIN = 0.02
BAD_CALLS_SHARE = 0.2
KL_FACTOR = 5.0
KL_NATS = 0.05
KL_BEFORE = 3
"""Rounds against which the KL to a reference is held: it grows from 0 in every run."""
PROXY_GAP = 0.25
BEYOND_SHARE = 0.2


@dataclass(frozen=True)
class RoundReward:
    """The rewards of one round.

    Attributes:
        mean: over the round.
        variance: of the groups' mean rewards.
        groups: in the round.
        range: of rewards.
    """

    mean: float
    variance: float
    groups: float
    range: float = 1.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RoundReward | None:
        """From a row of metrics; None if it does not say how large the round was."""
        keys = ("reward/mean", "reward/std", "groups/total")
        mean, std, groups = (_finite(row, key) for key in keys)
        if mean is None or std is None or groups is None:
            return None
        # Total variance = variance within groups + variance of the groups' means.
        within = _finite(row, "groups/reward_std_mean") or 0.0
        between = max(0.0, std**2 - within**2) * groups / max(1.0, groups - 1)
        most = _finite(row, "reward/max")
        return cls(mean, between, groups, max(1.0, 4 * std) if most and most > 1 else 1.0)

    def jumped_since(self, before: RoundReward) -> bool:
        """Whether the mean rose by more than the draw of tasks explains.

        A two-sample t-test with tasks as the unit, its level divided by the rounds of a run.
        """
        from scipy.special import stdtrit

        rise = self.mean - before.mean
        freedom = self.groups + before.groups - 2
        if rise <= REWARD_JUMP * before.range or freedom < 1:
            return False
        spread = (self.variance + before.variance) / 2
        error = math.sqrt(spread * (1 / self.groups + 1 / before.groups))
        return rise > float(stdtrit(freedom, 1 - FALSE_JUMPS / JUMP_ROUNDS)) * error


def find_signs(rows: Rows) -> list[str]:
    """Sentences on what a reader should check first; an empty list where no rule fires.

    Args:
        rows: metrics, one mapping per step, in order of steps.
    """
    checks: tuple[Callable[[Rows], list[str]], ...] = (
        _not_finite,
        _reward_without_held_out,
        _proxy_gap,
        _reward_jump,
        _kl_spike,
        _no_signal,
        _entropy,
        _length,
        _levels,
        _reward_version,
        _reward_beyond,
    )
    return [sentence for check in checks for sentence in check(rows)]


def alarms(rows: Rows) -> dict[str, str]:
    """Those of the signs that a run says while it still trains: name -> sentence."""
    checks: dict[str, Callable[[Rows], list[str]]] = {
        "reward_jump": _reward_jump,
        "length": _length,
        "kl": _kl_spike,
        "gap": _proxy_gap,
        "version": _reward_version,
        "beyond": _reward_beyond,
    }
    return {name: found[0] for name, check in checks.items() if (found := check(rows))}


CHECKED: dict[str, tuple[str, int]] = {
    "held-out pass@1": ("eval/pass_at_1", 2),
    "steps in reward": ("reward/mean", 2),
    "groups without signal": ("groups/no_signal", 2 * WINDOW),
    "entropy": ("policy/entropy", 2 * WINDOW),
    "length": ("length/sampled_mean", 2 * WINDOW),
    "clipping": ("policy/clip_high", 2 * WINDOW),
    "sampler against scorer": ("parity/gap_mean", 1),
    "calls that cannot be read": ("format/bad_calls_rate", 2 * WINDOW),
    "proxy against held-out": ("pass/train", WINDOW),
    "KL divergence": ("policy/kl", WINDOW + 1),
}
"""What is looked at: the metric, and in how many rounds it must stand to be judged."""


def coverage(rows: Rows) -> str:
    """A sentence that says what was looked at, over how many rounds, and what could not be."""
    counts = {name: len(_values(rows, key)) for name, (key, _) in CHECKED.items()}
    judged = [name for name, count in counts.items() if count >= CHECKED[name][1]]
    short = [
        f"{name} ({counts[name]} of at least {CHECKED[name][1]} rounds)"
        for name in counts
        if name not in judged
    ]
    rewards = _values(rows, "reward/mean")
    flat = "" if any(rewards) or not rewards else " No episode was ever rewarded."
    looked = f"Looked at over {len(rows)} rounds: {', '.join(judged)}." if judged else ""
    left = f" Not judged: {', '.join(short)}." if short else ""
    return (looked + left + flat).strip()


def series(rows: Rows, key: str) -> list[tuple[float, float]]:
    """(step, value) wherever the metric was logged; values that are not finite are kept."""
    return [(row["step"], float(row[key])) for row in rows if isinstance(row.get(key), int | float)]


def _not_finite(rows: Rows) -> list[str]:
    found: dict[str, list[int]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                found.setdefault(key, []).append(row["step"])
    return [
        f"{key} was not finite at {len(steps)} step{'s' * (len(steps) > 1)}, first at step"
        f" {steps[0]}."
        for key, steps in sorted(found.items())
    ]


def _reward_without_held_out(rows: Rows) -> list[str]:
    held_out = _values(rows, "eval/pass_at_1")
    reward = _ends(rows, "reward/mean")
    if len(held_out) < 2:
        return [
            "Held-out pass@1 was measured fewer than twice, so learning cannot be told from"
            " overfitting."
        ]
    gain = held_out[-1] - held_out[0]
    if reward and reward[1] - reward[0] > REWARD_GAIN and gain < HELD_OUT_GAIN:
        return [
            f"Training reward rose by {reward[1] - reward[0]:.2f} while held-out pass@1 changed by"
            f" {gain:+.2f}: read the episodes with the highest reward."
        ]
    return []


def _proxy_gap(rows: Rows) -> list[str]:
    held_out = [point for point in series(rows, "eval/pass_at_1") if math.isfinite(point[1])]
    if not held_out:
        return []
    step, passed = held_out[-1]
    trained = _values([row for row in rows if row["step"] <= step], "pass/train")
    if len(trained) < WINDOW:
        return []
    late = sum(trained[-WINDOW:]) / WINDOW
    if late - passed <= PROXY_GAP:
        return []
    return [
        f"{late:.0%} of the last training episodes before step {step:g} pass and {passed:.0%} of"
        " the held-out tasks then: what is trained on is easier, learnt by heart, or graded by a"
        " check that can be fooled."
    ]


def _kl_spike(rows: Rows) -> list[str]:
    for key, to, back in (
        ("policy/ref_kl", "reference", KL_BEFORE),
        ("policy/kl", "sampler", None),
    ):
        points = [point for point in series(rows, key) if math.isfinite(point[1])]
        for index in range(WINDOW, len(points)):
            before = points[:index] if back is None else points[index - back : index]
            usual = statistics.median(value for _, value in before)
            step, value = points[index]
            if value > max(KL_NATS, KL_FACTOR * usual):
                return [
                    f"KL to the {to} rose to {value:.3g} nats per token at step {step:g}, before"
                    f" that {usual:.3g}: the policy moved at once, read what it writes since."
                ]
    return []


def _reward_jump(rows: Rows) -> list[str]:
    changed = {step for step, *_ in _version_changes(rows)}
    rounds = [(row["step"], found) for row in rows if (found := RoundReward.of(row))]
    jumps = [
        (late.mean - early.mean, step)
        for (_, early), (step, late) in itertools.pairwise(rounds)
        if step not in changed and late.jumped_since(early)
    ]
    if not jumps:
        return []
    size, step = max(jumps)
    return [
        f"Reward rose by {size:.2f} at step {step:g}, more than the draw of tasks explains: look"
        " for a trick that was found there."
    ]


def _no_signal(rows: Rows) -> list[str]:
    ends = _ends(rows, "groups/no_signal")
    if not ends or ends[1] <= NO_SIGNAL_SHARE:
        return []
    solved, failed = (_ends(rows, key) for key in ("groups/all_pass", "groups/all_fail"))
    detail = (
        f" ({solved[1]:.0%} all solved, {failed[1]:.0%} all failed)" if solved and failed else ""
    )
    return [f"{ends[1]:.0%} of the last groups give no signal{detail}: change the mix of tasks."]


def _entropy(rows: Rows) -> list[str]:
    ends = _ends(rows, "policy/entropy")
    if not ends or ends[0] <= 0 or ends[1] > ENTROPY_SHARE * ends[0]:
        return []
    return [
        f"Entropy fell from {ends[0]:.3g} to {ends[1]:.3g} nats per token: exploration is nearly"
        " gone."
    ]


def _length(rows: Rows) -> list[str]:
    ends = _ends(rows, "length/sampled_mean")
    if not ends or ends[1] <= LENGTH_FACTOR * ends[0]:
        return []
    return [
        f"Responses grew from {ends[0]:.0f} to {ends[1]:.0f} tokens: check whether the length earns"
        " reward."
    ]


def _reward_version(rows: Rows) -> list[str]:
    if not (changes := _version_changes(rows)):
        return []
    step, before, now = changes[-1]
    return [
        f"The reward model's version changed from {before:g} to {now:g} at step {step:g}: rewards"
        " before and after cannot be compared."
    ]


def _version_changes(rows: Rows) -> list[tuple[float, float, float]]:
    """Step, version before it and since. Means over several models are no versions."""
    found = [one for one in series(rows, "reward/part/reward_model_version") if one[1] % 1 == 0]
    pairs = itertools.pairwise(found)
    return [(step, before, now) for (_, before), (step, now) in pairs if before != now]


def _reward_beyond(rows: Rows) -> list[str]:
    for step, share in series(rows, "reward/part/reward_model_beyond"):
        if share > BEYOND_SHARE:
            return [
                f"{share:.0%} of the reward model's scores at step {step:g} lie beyond those of all"
                " pairs that it was checked on: read what the policy writes since."
            ]
    return []


def _levels(rows: Rows) -> list[str]:
    found = []
    clipped = [
        end[1] for key in ("policy/clip_low", "policy/clip_high") if (end := _ends(rows, key))
    ]
    if sum(clipped) > CLIP_SHARE:
        found.append(
            f"{sum(clipped):.0%} of tokens are clipped in the last steps: the updates are too"
            " large."
        )
    gap = max(_values(rows, "parity/gap_mean"), default=0.0)
    if gap > PARITY_NATS:
        found.append(
            f"Sampler and scorer differ by up to {gap:.3g} nats per token on average:"
            " log-probabilities are off."
        )
    bad = _ends(rows, "format/bad_calls_rate")
    if bad and bad[1] > BAD_CALLS_SHARE:
        found.append(f"{bad[1]:.0%} of the last episodes hold a tool call that cannot be read.")
    return found


def _finite(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _values(rows: Rows, key: str) -> list[float]:
    return [value for _, value in series(rows, key) if math.isfinite(value)]


def _ends(rows: Rows, key: str) -> tuple[float, float] | None:
    """Means over the first and the last WINDOW steps; None for a run too short to have both."""
    values = _values(rows, key)
    if len(values) < 2 * WINDOW:
        return None
    return sum(values[:WINDOW]) / WINDOW, sum(values[-WINDOW:]) / WINDOW
