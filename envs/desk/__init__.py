"""desk-v0: serve a customer of a shop by its rules; every other change is a side effect.

The tools have the names, parameters and rules of tau2-bench's retail domain, whose data it reads.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agentrl.dialogue import Dialogue, User
from agentrl.envs.desk.retail import FILES, FOLDER, Retail, read_retail
from agentrl.envs.desk.shop import CHANGES, FINDS, Row, Shop
from agentrl.envs.shared import answered_calls, data_folder
from agentrl.errors import ConfigError
from agentrl.safety.writes import WriteSet
from agentrl.tools import tool
from agentrl.types import Limits, Message, Score, Task, TaskView, ToolCall
from agentrl.verifiers.base import Submission

Reason = Literal["no longer needed", "ordered by mistake"]
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_MAX_EXPRESSION_CHARS = 1000


class Caller:
    """A scripted customer: says everything in the first message and answers questions with yes.

    A turn of the agent without a question ends the conversation.
    """

    @contextmanager
    def speaker(self, task: TaskView, limits: Limits, seed: int) -> Iterator[_Says]:
        """Yield a speaker that knows what the customer knows."""
        yield _Says(task.metadata["user"]["known"])


@dataclass(frozen=True)
class _Says:
    known: str

    async def reply(self, said: str) -> str | None:
        return f"Yes, please. {self.known}" if "?" in said else None


class Desk(Dialogue):
    """Serve a customer by the shop's rules, on a database with 1,000 orders.

    Args:
        data: folder with tau2-bench's retail files; default: tools/tau_retail below the folder
            named by the environment variable AGENTRL_DATA.
    """

    id: ClassVar[str] = "desk-v0"
    limits = Limits(turns=40, tool_calls=60, wall_s=900, episode_tokens=16384)
    user: User = Caller()

    def __init__(self, data: str = "") -> None:
        if not isinstance(data, str):
            raise ConfigError(
                f"desk-v0: data={data!r} must be the path of a folder", setting="data"
            )
        self._data = data
        self.verifier = self.verdict

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """The tasks of a split, in the order of the files."""
        if split not in ("train", "test"):
            raise ConfigError(f"desk-v0: split={split!r} must be 'train' or 'test'")
        yield from self._retail().tasks[split]

    def prompt(self) -> list[Message]:
        """The shop's rules and the customer's first message."""
        return [Message.system(self._retail().policy), Message.user(self.task.instruction)]

    async def setup(self) -> None:
        """Open a fresh shop; only what the reference changes may change."""
        self.shop = self._new_shop()
        self.writes = WriteSet(state=tuple(self.task.metadata["changed"]))

    def state(self) -> Mapping[str, Any]:
        """Users and orders: the customer's own in full, every other row by its digest."""
        return self.shop.rows_of(self.task.metadata["customer"])

    async def verdict(self, submission: Submission) -> Score:
        """Whether the database ends as the reference leaves it; see `judge_service`."""
        return judge_service(submission, self._new_shop)

    @tool
    def find_user_id_by_email(self, email: str) -> str:
        """Find the id of a user by email address."""
        return self.shop.find_user_id_by_email(email)

    @tool
    def find_user_id_by_name_zip(self, first_name: str, last_name: str, zip: str) -> str:
        """Find the id of a user by name and postal code; try the email address first."""
        return self.shop.find_user_id_by_name_zip(first_name, last_name, zip)

    @tool
    def get_user_details(self, user_id: str) -> Row:
        """Show a user's profile: address, email, payment methods, ids of orders.

        Args:
            user_id: for example sara_doe_496.
        """
        return self.shop.user(user_id)

    @tool
    def get_order_details(self, order_id: str) -> Row:
        """Show an order: items, status, address, payments.

        Args:
            order_id: with its #, for example #W0000000.
        """
        return self.shop.order(order_id)

    @tool
    def get_product_details(self, product_id: str) -> Row:
        """Show a type of product and all of its variants.

        Args:
            product_id: of the type of product, which is no item id.
        """
        return self.shop.product(product_id)

    @tool
    def get_item_details(self, item_id: str) -> Row:
        """Show one variant: its options, price, and whether it is available.

        Args:
            item_id: of the variant, which is no product id.
        """
        return self.shop.item(item_id)

    @tool
    def list_all_product_types(self) -> dict[str, str]:
        """List the names of all types of products with their product ids."""
        return self.shop.product_ids()

    @tool
    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression: numbers, + - * / and brackets.

        Args:
            expression: for example 2 * (3.5 + 1).
        """
        return calculate(expression)

    @tool(effect="irreversible")
    def cancel_pending_order(self, order_id: str, reason: Reason) -> Row:
        """Cancel a pending order and refund it. Needs the customer's explicit confirmation.

        Args:
            order_id: with its #, for example #W0000000.
            reason: the customer's.
        """
        return self.shop.cancel_pending_order(order_id, reason)

    @tool(effect="write")
    def modify_pending_order_address(
        self,
        order_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Row:
        """Change a pending order's delivery address. Needs the customer's explicit confirmation.

        Args:
            order_id: with its #, for example #W0000000.
            address1: street and number.
            address2: second line, such as Suite 12; may be empty.
            state: for example CA.
            country: for example USA.
            zip: postal code.
        """
        return self.shop.modify_pending_order_address(
            order_id,
            address1=address1,
            address2=address2,
            city=city,
            state=state,
            country=country,
            zip=zip,
        )

    @tool(effect="write")
    def modify_user_address(
        self,
        user_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Row:
        """Change a user's default address. Needs the customer's explicit confirmation.

        Args:
            user_id: for example sara_doe_496.
            address1: street and number.
            address2: second line, such as Suite 12; may be empty.
            state: for example CA.
            country: for example USA.
            zip: postal code.
        """
        return self.shop.modify_user_address(
            user_id,
            address1=address1,
            address2=address2,
            city=city,
            state=state,
            country=country,
            zip=zip,
        )

    @tool(effect="write")
    def modify_pending_order_payment(self, order_id: str, payment_method_id: str) -> Row:
        """Charge a pending order to another payment method. Needs the customer's confirmation.

        Args:
            order_id: with its #, for example #W0000000.
            payment_method_id: one of the customer's, for example gift_card_0000000.
        """
        return self.shop.modify_pending_order_payment(order_id, payment_method_id)

    @tool(effect="irreversible")
    def modify_pending_order_items(
        self,
        order_id: str,
        item_ids: list[str],
        new_item_ids: list[str],
        payment_method_id: str,
    ) -> Row:
        """Change items of a pending order, once per order. Needs the customer's confirmation.

        Args:
            order_id: with its #, for example #W0000000.
            item_ids: all items to be changed, each as often as it is to be changed.
            new_item_ids: for each of them, in the same order, a variant of the same product.
            payment_method_id: pays or receives the difference in price.
        """
        return self.shop.modify_pending_order_items(
            order_id, item_ids, new_item_ids, payment_method_id
        )

    @tool(effect="irreversible")
    def return_delivered_order_items(
        self, order_id: str, item_ids: list[str], payment_method_id: str
    ) -> Row:
        """Return items of a delivered order. Needs the customer's explicit confirmation.

        Args:
            order_id: with its #, for example #W0000000.
            item_ids: all items to be returned, each as often as it is to be returned.
            payment_method_id: the one that paid, or a gift card of the customer.
        """
        return self.shop.return_delivered_order_items(order_id, item_ids, payment_method_id)

    @tool(effect="irreversible")
    def exchange_delivered_order_items(
        self,
        order_id: str,
        item_ids: list[str],
        new_item_ids: list[str],
        payment_method_id: str,
    ) -> Row:
        """Exchange items of a delivered order, once per order. Needs the customer's confirmation.

        Args:
            order_id: with its #, for example #W0000000.
            item_ids: all items to be exchanged, each as often as it is to be exchanged.
            new_item_ids: for each of them, in the same order, a variant of the same product.
            payment_method_id: pays or receives the difference in price.
        """
        return self.shop.exchange_delivered_order_items(
            order_id, item_ids, new_item_ids, payment_method_id
        )

    @tool(effect="write")
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the customer over to a human agent if the rules leave no other way.

        Args:
            summary: what the customer needs.
        """
        return "Transfer successful"

    def _retail(self) -> Retail:
        return read_retail(data_folder(self.id, self._data, FOLDER, FILES))

    def _new_shop(self) -> Shop:
        return Shop(self._retail().tables)


def judge_service(submission: Submission, new_shop: Callable[[], Shop]) -> Score:
    """1.0 if the final state is right and the agent said everything it had to; otherwise 0.0.

    The state is recomputed by replaying the episode's calls in a fresh shop, so the verdict rests
    on the messages alone. As in tau2, the agent said something if one of its turns contains it,
    ignoring case and commas. If nothing has to change and nothing has to be said, the customer
    must have been identified; otherwise doing nothing would pass.

    `parts`: "state", "said" (a share) and, where it counts, "identified".
    """
    hidden, shop = submission.task.hidden, new_shop()
    lookups = set()
    for call, answer in answered_calls(submission.messages):
        if call.name in FINDS:
            lookups.add(answer)
        elif call.name in CHANGES:
            shop = _replay(shop, call, answer)
    spoken = "\n".join(
        message.content.lower().replace(",", "")
        for message in submission.messages
        if message.role == "assistant"
    )
    said = [text.lower().replace(",", "") in spoken for text in hidden["said"]]
    parts = {
        "state": float(shop.fingerprint() == hidden["state"]),
        "said": sum(said) / len(said) if said else 1.0,
    }
    if customer := hidden["identified"]:
        parts["identified"] = float(any(customer in answer for answer in lookups))
    return Score(float(all(part == 1.0 for part in parts.values())), parts)


def _replay(shop: Shop, call: ToolCall, answer: str) -> Shop:
    """The shop after a call that really ran: its answer contains the row that it changed.

    If a guard answered instead of the tool, the answer does not, and the shop stays the same.
    """
    trial = shop.fork()
    with suppress(ValueError):
        row = trial.change(call.name, call.arguments)
        if json.dumps(row, ensure_ascii=False) in answer:
            return trial
    return shop


def calculate(expression: str) -> str:
    """Evaluate numbers, + - * / and brackets; the result is rounded to two digits.

    Raises:
        ValueError: the expression contains anything else, or has no value.
    """
    if len(expression) > _MAX_EXPRESSION_CHARS:
        raise ValueError(f"an expression may have at most {_MAX_EXPRESSION_CHARS} characters")
    try:
        return str(round(float(_evaluate(ast.parse(expression.strip(), mode="eval").body)), 2))
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ValueError(f"the expression has no value: {error}") from None


def _evaluate(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))
    raise ValueError("use numbers, + - * / and brackets")
