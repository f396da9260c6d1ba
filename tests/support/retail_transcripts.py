"""Recorded transcripts of retail tools: which call each answer came from, and what the shop says.

The transcripts show answers and no calls. A call is worked out from its answer, from the state at
that point and from what was said before.
"""

from __future__ import annotations

import gzip
import json
import re
from contextlib import suppress

from agentrl.envs.desk import calculate
from agentrl.envs.desk.shop import ADDRESS, Shop

_EMAIL = re.compile(r"[\w.]+@[\w.]+\w")
_NAMED = re.compile(r"([A-Z][a-z]+) ([A-Z][a-z]+)\b")


def outcomes_of(folder, tables, expressions):
    """(kind of call, outcome) of every tool answer of every transcript."""
    for transcript in read_transcripts(folder):
        yield from Replay(tables, expressions).outcomes(transcript)


def read_transcripts(folder):
    """Each transcript as a list of (role, text)."""
    rows = gzip.decompress((folder / "few_shot_trajectories.jsonl.gz").read_bytes()).decode()
    for row in rows.splitlines():
        text = json.loads(row)["messages_display"]
        parts = re.split(r"^(user|assistant|tool): ?", text, flags=re.M)
        yield [
            (role, text.strip("\n")) for role, text in zip(parts[1::2], parts[2::2], strict=True)
        ]


class Replay:
    """One transcript against one shop."""

    def __init__(self, tables, expressions):
        self.tables, self.shop, self.expressions = tables, Shop(tables), expressions
        self.customer, self.moved = "", None
        self.product_of = {
            item: product["product_id"]
            for product in tables["products"].values()
            for item in product["variants"]
        }

    def outcomes(self, transcript):
        """For each tool answer: (kind of call, "equal", "differs" or why nothing is known)."""
        for place, (role, text) in enumerate(transcript):
            if role == "tool":
                before = "\n".join(said for _, said in transcript[:place])
                yield self._outcome(text, before)

    def _outcome(self, text, before):
        if text == "":
            return "think", "no such tool in the policy"
        if text == "Transfer successful":
            return "transfer_to_human_agents", "equal"
        if text.startswith("Error: "):
            return self._refused(text.removeprefix("Error: "), before)
        if re.fullmatch(r"[a-z]+_[a-z]+_\d+", text):
            return self._found(text, before)
        told = json.loads(text)
        if isinstance(told, float | int):
            values = {calculate(expression) for expression in self.expressions}
            return "calculate", "equal" if text in values else "expression unknown"
        if "order_id" in told:
            return self._ordered(told)
        if "email" in told:
            return self._profiled(told)
        if "variants" in told:
            return "get_product_details", _same(told, self.shop.product(told["product_id"]))
        return "list_all_product_types", _same(told, self.shop.product_ids())

    def _found(self, user_id, before):
        self.customer = user_id
        user = self.shop.user(user_id)
        if user["email"] in before.lower():
            return "find_user_id_by_email", _same(
                user_id, self.shop.find_user_id_by_email(user["email"])
            )
        name = user["name"]
        found = self.shop.find_user_id_by_name_zip(
            name["first_name"], name["last_name"], user["address"]["zip"]
        )
        return "find_user_id_by_name_zip", _same(user_id, found)

    def _profiled(self, told):
        """A profile has `province` until its address is changed, and `state` from then on."""
        if "province" not in told["address"] and told["address"] != self.moved:
            self.moved = told["address"]
            self.shop.modify_user_address(self.customer, **told["address"])
            name = "modify_user_address"
        else:
            name = "get_user_details"
        return name, _same(told, _as_before(self.shop.user(self.customer), bool(self.moved)))

    def _ordered(self, told):
        now = self.shop.order(told["order_id"])
        if _same(told, now) == "equal":
            return "get_order_details", "equal"
        name, arguments = _change_from(now, told, self.product_of)
        with suppress(ValueError):
            return name, _same(told, self.shop.change(name, arguments))
        return name, "differs"

    def _refused(self, why, before):
        if why == "user not found":
            return self._not_found(before)
        if why == "order not found":
            ids = [each for each in re.findall(r"#?W?\d{7}", before) if not self._is_order(each)]
            return "get_order_details", "equal" if ids else "arguments unknown"
        tried = list(self._tries(why))
        return "refused change", "equal" if why in tried else "differs"

    def _not_found(self, before):
        calls = [(self.shop.find_user_id_by_email, (email,)) for email in _EMAIL.findall(before)]
        zips = re.findall(r"\b\d{5}\b", before)
        calls += [
            (self.shop.find_user_id_by_name_zip, (*name, code))
            for name in _NAMED.findall(before)
            for code in zips
        ]
        why = {_sentence(call, *given) for call, given in calls}
        return "find_user_id", "equal" if "user not found" in why else "arguments unknown"

    def _is_order(self, order_id):
        return order_id in self.tables["orders"]

    def _tries(self, why):
        """What the shop says to calls of the customer's that might have been refused like this."""
        methods = self.shop.user(self.customer)["payment_methods"]
        wanted = re.search(r"new item (\d+)", why)
        for order_id in self.shop.user(self.customer)["orders"]:
            for item in self.shop.order(order_id)["items"]:
                old, new = [item["item_id"]], [wanted[1]] if wanted else [item["item_id"]]
                for method in methods:
                    fork = self.shop.fork()
                    yield _sentence(fork.return_delivered_order_items, order_id, old, method)
                    for other in (new, new * 2):
                        for change in (
                            fork.exchange_delivered_order_items,
                            fork.modify_pending_order_items,
                        ):
                            yield _sentence(change, order_id, old, other, method)


def _change_from(now, told, product_of):
    """The change that leads from one state of an order to another one."""
    given = {"order_id": told["order_id"]}
    if told["status"] == "cancelled":
        return "cancel_pending_order", given | {"reason": told["cancel_reason"]}
    for kind, name in (("return", "return_"), ("exchange", "exchange_")):
        if told["status"] == f"{kind} requested":
            given |= {"item_ids": told[f"{kind}_items"]}
            given |= {"payment_method_id": told[f"{kind}_payment_method_id"]}
            if kind == "exchange":
                given |= _paired(told, product_of)
            return f"{name}delivered_order_items", given
    if told["status"] == "pending (item modified)" and now["status"] == "pending":
        pairs = [
            (old["item_id"], new["item_id"])
            for old, new in zip(now["items"], told["items"], strict=True)
            if old != new
        ]
        given |= {"item_ids": [old for old, _ in pairs], "new_item_ids": [new for _, new in pairs]}
        last = told["payment_history"][-1]["payment_method_id"]
        return "modify_pending_order_items", given | {"payment_method_id": last}
    if told["address"] != now["address"]:
        return "modify_pending_order_address", given | {p: told["address"][p] for p in ADDRESS}
    new = told["payment_history"][len(now["payment_history"])]["payment_method_id"]
    return "modify_pending_order_payment", given | {"payment_method_id": new}


def _paired(told, product_of):
    """The exchanged items with a new one of the same product each; the answer only sorts both."""
    left, pairs = list(told["exchange_new_items"]), []
    for old in told["exchange_items"]:
        new = next(each for each in left if product_of[each] == product_of[old])
        left.remove(new)
        pairs.append((old, new))
    return {"item_ids": [old for old, _ in pairs], "new_item_ids": [new for _, new in pairs]}


def _as_before(user, moved):
    """A profile as the transcripts have it: without its id, `province` for `state`."""
    name = "state" if moved else "province"
    address = {(name if key == "state" else key): v for key, v in user["address"].items()}
    return {key: v for key, v in user.items() if key != "user_id"} | {"address": address}


def _same(told, ours):
    return "equal" if told == ours else "differs"


def _sentence(call, *given):
    try:
        call(*given)
    except ValueError as error:
        return str(error)
    return ""
