"""tau2's retail data as tasks: what to ask for, what has to change, what has to be said.

The files are those of tau2-bench's retail domain (Barres et al. 2025, arXiv 2506.07982), whose
database and tasks come from tau-bench (Yao et al. 2024, arXiv 2406.12045).
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.envs.desk.shop import CHANGES, FINDS, Shop, Tables
from agentrl.errors import ConfigError
from agentrl.safety.ledger import changed_leaves, leaves_of
from agentrl.types import Task

FOLDER = "tools/tau_retail"
FILES = ("db.json.gz", "tasks.json.gz", "split_tasks.json", "policy.md")


@dataclass(frozen=True)
class Retail:
    """What a folder of the data holds.

    Attributes:
        tables: the database before any task.
        policy: what the agent is told.
        tasks: split -> its tasks, in the order of the files.
    """

    tables: Tables
    policy: str
    tasks: Mapping[str, Sequence[Task]]


@lru_cache(maxsize=4)
def read_retail(folder: Path) -> Retail:
    """Read `FILES`.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
    """
    try:
        tables: Tables = json.loads(gzip.decompress((folder / "db.json.gz").read_bytes()))
        rows = json.loads(gzip.decompress((folder / "tasks.json.gz").read_bytes()))
        splits = json.loads((folder / "split_tasks.json").read_text())
        tasks = {row["id"]: _task(row, tables) for row in rows}
        chosen = {split: [tasks[name] for name in splits[split]] for split in ("train", "test")}
        return Retail(tables, (folder / "policy.md").read_text(), chosen)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"desk-v0: data={str(folder)!r} does not hold tau2-bench's retail files:"
            f" {type(error).__name__}: {error}"
        ) from error


def _task(row: Mapping[str, Any], tables: Tables) -> Task:
    told, wanted = row["user_scenario"]["instructions"], row["evaluation_criteria"]
    parts = ("known_info", "unknown_info", "reason_for_call", "task_instructions")
    texts = [str(told[part] or "").strip() for part in parts]
    calls = [{"name": one["name"], "arguments": one["arguments"]} for one in wanted["actions"]]
    before, after = Shop(tables), Shop(tables)
    customer = _customer(calls, texts[0], before)
    for call in calls:
        if call["name"] in CHANGES:
            with suppress(ValueError):  # some references try what the rules forbid
                after.change(call["name"], call["arguments"])
    changed = _changed(before.rows_of(customer), after.rows_of(customer))
    said = list(wanted["communicate_info"] or ())
    # Nothing to change and nothing to say: then doing nothing would be right as well.
    identify = not changed and not said
    if identify and not any(call["name"] in FINDS for call in calls):
        email = before.user(customer)["email"]
        calls.insert(0, {"name": FINDS[0], "arguments": {"email": email}})
    return Task(
        id=f"desk-{row['id']}",
        instruction=f"I read out what I was given. {' '.join(t for t in texts if t != '.')}",
        metadata={
            "customer": customer,
            "changed": changed,
            "user": {"known": texts[0], "goal": " ".join(texts)},
        },
        hidden={
            "state": after.fingerprint(),
            "said": said,
            "identified": customer if identify else None,
        },
        oracle={"calls": calls, "answer": " ".join(["This is done.", *said])},
    )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Places that differ; rows that are equal are not walked through."""
    old, new = (
        leaves_of(
            {
                table: {name: row for name, row in rows.items() if row != other[table][name]}
                for table, rows in state.items()
            }
        )
        for state, other in ((before, after), (after, before))
    )
    return sorted(place for place, _ in changed_leaves(old, new))


def _customer(calls: Sequence[Mapping[str, Any]], known: str, shop: Shop) -> str:
    """The user whom the task is about: by the calls of the reference, else by what is known."""
    for call in calls:
        given = call["arguments"]
        with suppress(ValueError):
            if call["name"] in FINDS:
                return str(getattr(shop, call["name"])(**given))
            if "user_id" in given:
                return str(given["user_id"])
            if "order_id" in given:
                return str(shop.order(given["order_id"])["user_id"])
    if named := re.search(r"\b[a-z]+_[a-z]+_\d{4}\b", known):
        return str(shop.user(named[0])["user_id"])
    found = re.search(r"([A-Z][a-z]+) ([A-Z][a-z]+)\b.*?(\d{5})", known)
    if found is None:
        raise ValueError(f"nobody is named in {known!r}")
    return shop.find_user_id_by_name_zip(*found.groups())
