"""The shop of desk-v0: users, orders and products, and the rules by which they change."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

Row = dict[str, Any]
Tables = Mapping[str, Mapping[str, Row]]

_CHANGING: Final = ("users", "orders")
REASONS: Final = ("no longer needed", "ordered by mistake")
ADDRESS: Final = ("address1", "address2", "city", "state", "country", "zip")
FINDS: Final = ("find_user_id_by_email", "find_user_id_by_name_zip")
CHANGES: Final = (
    *("cancel_pending_order", "modify_pending_order_address", "modify_pending_order_payment"),
    *("modify_pending_order_items", "modify_user_address"),
    *("return_delivered_order_items", "exchange_delivered_order_items"),
)
"""Tools that change the shop; its methods have their names and parameters."""


class Shop:
    """One copy of the database; rows are copied when they are first changed.

    What a rule forbids raises ValueError, and then nothing was changed.

    Args:
        tables: "users", "orders" and "products", each a mapping of ids to rows; left as they are.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._changed: dict[str, dict[str, Row]] = {name: {} for name in _CHANGING}

    def fork(self) -> Shop:
        """A copy that changes by itself."""
        other = Shop(self._tables)
        other._changed = copy.deepcopy(self._changed)
        return other

    def change(self, name: str, arguments: Mapping[str, Any]) -> Row:
        """Run one of `CHANGES`; the row that it changed."""
        assert name in CHANGES
        row: Row = getattr(self, name)(**arguments)
        return row

    def user(self, user_id: str) -> Row:
        """The profile of a user."""
        return self._row("users", user_id, "user")

    def order(self, order_id: str) -> Row:
        """An order, whose id begins with #."""
        return self._row("orders", order_id, "order")

    def product(self, product_id: str) -> Row:
        """A type of product with its variants."""
        return self._row("products", product_id, "product")

    def item(self, item_id: str) -> Row:
        """One variant of whichever product it belongs to."""
        for product in self._tables["products"].values():
            if item_id in product["variants"]:
                return dict(product["variants"][item_id])
        raise ValueError(f"item {item_id} not found")

    def product_ids(self) -> dict[str, str]:
        """Name of each type of product -> its id, sorted by name."""
        products = self._tables["products"].values()
        return dict(sorted((each["name"], each["product_id"]) for each in products))

    def find_user_id_by_email(self, email: str) -> str:
        """The id of the user with this address, whatever its case."""
        return self._find(lambda user: user["email"].lower() == email.lower())

    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """The id of the user with this name, whatever its case, and postal code."""
        wanted = (first_name.lower(), last_name.lower(), zip)
        return self._find(
            lambda user: (
                (
                    user["name"]["first_name"].lower(),
                    user["name"]["last_name"].lower(),
                    user["address"]["zip"],
                )
                == wanted
            )
        )

    def cancel_pending_order(self, order_id: str, reason: str) -> Row:
        """Cancel a pending order and refund every payment of it."""
        order = self._order_that_is(order_id, "pending", "cancelled")
        if reason not in REASONS:
            raise ValueError(f"invalid reason: use one of {', '.join(REASONS)}")
        refunds = [
            _payment("refund", each["amount"], each["payment_method_id"])
            for each in order["payment_history"]
        ]
        for refund in refunds:
            self._move_gift(order["user_id"], refund["payment_method_id"], refund["amount"])
        order = self._own("orders", order_id)
        order["status"], order["cancel_reason"] = "cancelled", reason
        order["payment_history"] += refunds
        return order

    def modify_user_address(self, user_id: str, **address: str) -> Row:
        """Replace the default address of a user."""
        self.user(user_id)
        row = self._own("users", user_id)
        row["address"] = {part: address[part] for part in ADDRESS}
        return row

    def modify_pending_order_address(self, order_id: str, **address: str) -> Row:
        """Replace the address to which a pending order goes."""
        self._order_that_is(order_id, "pending", "modified", by_prefix=True)
        row = self._own("orders", order_id)
        row["address"] = {part: address[part] for part in ADDRESS}
        return row

    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Row:
        """Charge another payment method for a pending order and refund the old one."""
        order = self._order_that_is(order_id, "pending", "modified", by_prefix=True)
        method, paid = self._method(order, payment_method_id), order["payment_history"]
        if len(paid) != 1 or paid[0]["transaction_type"] != "payment":
            raise ValueError("there should be exactly one payment for a pending order")
        amount, old = paid[0]["amount"], paid[0]["payment_method_id"]
        if old == payment_method_id:
            raise ValueError("the new payment method should be different from the current one")
        if method["source"] == "gift_card" and method["balance"] < amount:
            raise ValueError("insufficient gift card balance to pay for the order")
        self._move_gift(order["user_id"], payment_method_id, -amount)
        self._move_gift(order["user_id"], old, amount)
        order = self._own("orders", order_id)
        order["payment_history"] += [
            _payment("payment", amount, payment_method_id),
            _payment("refund", amount, old),
        ]
        return order

    def modify_pending_order_items(
        self,
        order_id: str,
        item_ids: Sequence[str],
        new_item_ids: Sequence[str],
        payment_method_id: str,
    ) -> Row:
        """Put other variants in the place of items of a pending order, once per order."""
        order = self._order_that_is(order_id, "pending", "modified")
        gap = self._gap(order, item_ids, new_item_ids)
        self._pay_gap(order, payment_method_id, gap)
        self._move_gift(order["user_id"], payment_method_id, -gap)
        order = self._own("orders", order_id)
        kind = "payment" if gap > 0 else "refund"
        order["payment_history"].append(_payment(kind, abs(gap), payment_method_id))
        for old, new in zip(item_ids, new_item_ids, strict=True):
            item = next(each for each in order["items"] if each["item_id"] == old)
            variant = self._tables["products"][item["product_id"]]["variants"][new]
            item |= {"item_id": new, "price": variant["price"], "options": variant["options"]}
        order["status"] = "pending (item modified)"
        return order

    def exchange_delivered_order_items(
        self,
        order_id: str,
        item_ids: Sequence[str],
        new_item_ids: Sequence[str],
        payment_method_id: str,
    ) -> Row:
        """Ask for other variants in exchange for items of a delivered order."""
        order = self._order_that_is(order_id, "delivered", "exchanged")
        gap = round(self._gap(order, item_ids, new_item_ids), 2)
        self._pay_gap(order, payment_method_id, gap)
        order = self._own("orders", order_id)
        order["status"] = "exchange requested"
        order["exchange_items"] = sorted(item_ids)
        order["exchange_new_items"] = sorted(new_item_ids)
        order["exchange_payment_method_id"] = payment_method_id
        order["exchange_price_difference"] = gap
        return order

    def return_delivered_order_items(
        self, order_id: str, item_ids: Sequence[str], payment_method_id: str
    ) -> Row:
        """Ask to return items of a delivered order."""
        order = self._order_that_is(order_id, "delivered", "returned")
        method = self._method(order, payment_method_id)
        original = order["payment_history"][0]["payment_method_id"]
        if payment_method_id != original and method["source"] != "gift_card":
            raise ValueError(
                "payment method should be either the original payment method or a gift card"
            )
        _check_held(order, item_ids)
        order = self._own("orders", order_id)
        order["status"] = "return requested"
        order["return_items"] = sorted(item_ids)
        order["return_payment_method_id"] = payment_method_id
        return order

    def rows_of(self, user_id: str) -> dict[str, dict[str, Any]]:
        """Users and orders: those of one user whole, every other row by its digest alone."""
        told: dict[str, dict[str, Any]] = {}
        for name in _CHANGING:
            told[name] = dict(_digests(_Pinned(self._tables[name])))
            told[name] |= {row_id: _digest(row) for row_id, row in self._changed[name].items()}
        if user_id in self._tables["users"]:
            told["users"][user_id] = self.user(user_id)
            for order_id in self.user(user_id)["orders"]:
                told["orders"][order_id] = self.order(order_id)
        return told

    def fingerprint(self) -> str:
        """A hash that two shops of one database share if, and only if, their rows are equal."""
        differing = {
            f"{name}/{row_id}": row
            for name in _CHANGING
            for row_id, row in self._changed[name].items()
            if row != self._tables[name][row_id]
        }
        return _digest(differing)

    def _find(self, fits: Callable[[Row], bool]) -> str:
        for user_id in self._tables["users"]:
            if fits(self.user(user_id)):
                return user_id
        raise ValueError("user not found")

    def _row(self, table: str, row_id: str, what: str) -> Row:
        found = self._changed.get(table, {}).get(row_id) or self._tables[table].get(row_id)
        if found is None:
            raise ValueError(f"{what} not found")
        return found

    def _own(self, table: str, row_id: str) -> Row:
        """The row, to be changed."""
        if row_id not in self._changed[table]:
            self._changed[table][row_id] = copy.deepcopy(self._tables[table][row_id])
        return self._changed[table][row_id]

    def _order_that_is(
        self, order_id: str, status: str, wanted: str, *, by_prefix: bool = False
    ) -> Row:
        order = self.order(order_id)
        met = order["status"].startswith(status) if by_prefix else order["status"] == status
        if not met:
            raise ValueError(f"non-{status} order cannot be {wanted}")
        return order

    def _method(self, order: Row, method_id: str) -> Row:
        methods = self.user(order["user_id"])["payment_methods"]
        if method_id not in methods:
            raise ValueError("payment method not found")
        method: Row = methods[method_id]
        return method

    def _gap(self, order: Row, items: Sequence[str], new_items: Sequence[str]) -> float:
        """What the new items cost more than the old ones, in US dollars."""
        _check_held(order, items)
        if len(items) != len(new_items):
            raise ValueError("the number of items to be exchanged should match")
        gap = 0.0
        for old, new in zip(items, new_items, strict=True):
            item = next(each for each in order["items"] if each["item_id"] == old)
            variant = self.product(item["product_id"])["variants"].get(new)
            if variant is None or not variant["available"]:
                raise ValueError(f"new item {new} not found or available")
            gap += variant["price"] - item["price"]
        return gap

    def _pay_gap(self, order: Row, method_id: str, gap: float) -> None:
        method = self._method(order, method_id)
        if method["source"] == "gift_card" and method["balance"] < gap:
            raise ValueError("insufficient gift card balance to pay for the price difference")

    def _move_gift(self, user_id: str, method_id: str, amount: float) -> None:
        """Add to a gift card; other payment methods are settled elsewhere."""
        if self.user(user_id)["payment_methods"][method_id]["source"] == "gift_card":
            card = self._own("users", user_id)["payment_methods"][method_id]
            card["balance"] = round(card["balance"] + amount, 2)


def _check_held(order: Row, items: Sequence[str]) -> None:
    held = Counter(item["item_id"] for item in order["items"])
    for item, count in Counter(items).items():
        if held[item] < count:
            raise ValueError(f"{item} not found")


def _payment(kind: str, amount: float, method_id: str) -> Row:
    return {"transaction_type": kind, "amount": amount, "payment_method_id": method_id}


def _digest(row: Any) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


class _Pinned:
    """A table as a key: it is held as long as its digests are."""

    def __init__(self, table: Mapping[str, Row]) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pinned) and self.table is other.table


@lru_cache(maxsize=8)
def _digests(pinned: _Pinned) -> dict[str, str]:
    return {row_id: _digest(row) for row_id, row in pinned.table.items()}
