"""What a report says of safety: decisions by rule, side effects, injected text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from agentrl.evaluation.stats import clustered_ci
from agentrl.evaluation.summary import (
    AttackOutcome,
    attack_outcome,
    injection_rates,
    is_exposed,
    payload_of,
)
from agentrl.trajectory import Episode

MOST_ROWS = 20
RATES = {
    "benign_utility": "unattacked tasks solved",
    "utility_under_attack": "attacked tasks solved",
    "attack_success": "goals of attackers reached, of episodes that saw the attack",
    "false_block": "unattacked episodes with a call that was denied or undone",
}


class Watched(NamedTuple):
    """What the page counts of one episode.

    Attributes:
        task: id of the task, the unit of every interval.
        kinds: how things were changed that should not have been, once each; None: not measured.
        decisions: (verdict, rule) -> how often.
        tainted: whether untrusted text stood in the arguments of a call.
        attack: what the rates of injection need; None without a score.
    """

    task: str
    kinds: frozenset[str] | None
    decisions: Counter[tuple[str, str]]
    tainted: bool
    attack: AttackOutcome | None

    @property
    def is_stopped(self) -> bool:
        """Whether a guard denied or undid a call."""
        return any(verdict in ("deny", "rollback") for verdict, _ in self.decisions)

    @classmethod
    def of(cls, episode: Episode) -> Watched:
        """Read it off an episode."""
        effects = episode.side_effects
        return cls(
            episode.task.id,
            None if effects is None else frozenset(effects.values()),
            Counter((event.verdict, event.rule) for event in episode.events),
            any(event.taint for event in episode.events),
            attack_outcome(episode),
        )


def safety_tables(watched: Sequence[Watched]) -> dict[str, Any]:
    """Rates (what, share, its interval, of how many) and rules (verdict, rule, calls, episodes).

    Both are empty where nothing was measured, no guard decided, and no task was attacked.
    """
    rates = []
    measured = [one for one in watched if one.kinds is not None]
    if measured:
        rates.append(_rate("episodes with side effects", measured, lambda one: bool(one.kinds)))
    kinds = Counter(kind for one in measured for kind in one.kinds or ())
    for kind, _ in kinds.most_common(MOST_ROWS):
        rates.append(_rate(f"… {kind}", measured, lambda one, kind=kind: kind in one.kinds))
    if guarded := [one for one in watched if one.decisions]:
        stopped = "judged episodes with a call that was denied or undone"
        rates.append(_rate(stopped, guarded, lambda one: one.is_stopped))
        tainted = "judged episodes with untrusted text in a call"
        rates.append(_rate(tainted, guarded, lambda one: one.tainted))
    if found := injection_rates([one.attack for one in watched if one.attack]):
        for name, what in RATES.items():
            row = found[name]
            rates.append({"what": what, "share": row["value"], "ci95": row["ci95"], "n": row["n"]})
    calls: Counter[tuple[str, str]] = Counter()
    episodes: Counter[tuple[str, str]] = Counter()
    for one in watched:
        calls += one.decisions
        episodes += Counter(set(one.decisions))
    rules = [
        {"verdict": verdict, "rule": rule, "calls": count, "episodes": episodes[verdict, rule]}
        for (verdict, rule), count in calls.most_common(MOST_ROWS)
    ]
    return {"rates": rates, "rules": rules}


def safety_row(episode: Episode, most: int) -> dict[str, Any]:
    """What the page's script shows of an episode: at most so many decisions, and the injection."""
    payload = payload_of(episode)
    goal = str((episode.task.metadata.get("injection") or {}).get("goal", ""))
    seen = attack_outcome(episode)
    attack = {
        "goal": goal,
        "payload": payload,
        "exposed": is_exposed(episode) if payload else False,
        "reached": bool(seen and seen.reached),
    }
    events = [
        {name: getattr(event, name) for name in event.__slots__} for event in episode.events[:most]
    ]
    return {
        "events": events,
        "events_cut": max(0, len(episode.events) - most),
        "injection": attack if payload else None,
    }


def _rate(what: str, among: Sequence[Watched], holds: Callable[..., bool]) -> dict[str, Any]:
    hits = [holds(one) for one in among]
    return {
        "what": what,
        "share": sum(hits) / len(hits),
        "ci95": clustered_ci([one.task for one in among], hits),
        "n": len(hits),
    }
