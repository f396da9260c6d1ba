"""desk-v0: serve a customer of a shop by its rules; every other change is a side effect.

The tools have the names, parameters and rules of tau2-bench's retail domain, whose data it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from agentrl.dialogue import Dialogue, User
from agentrl.envs.desk.retail import FILES, FOLDER, Retail, read_retail
from agentrl.envs.desk.shop import Row, Shop
from agentrl.envs.desk.sums import calculate
from agentrl.envs.desk.verdict import judge_service
from agentrl.envs.given import given_folder
from agentrl.errors import ConfigError
from agentrl.safety.writes import WriteSet
from agentrl.tools import tool
from agentrl.types import Limits, Message, Score, Task, TaskView
from agentrl.verifiers.base import Submission

Reason = Literal["no longer needed", "ordered by mistake"]


class Caller:
    """A customer by script: the first message says everything; a question is answered with yes.

    A turn of the agent without a question ends the conversation.
    """

    @contextmanager
    def speaker(self, task: TaskView, limits: Limits, seed: int) -> Iterator[_Says]:
        """A speaker that knows what the customer knows."""
        yield _Says(task.metadata["user"]["known"])


@dataclass(frozen=True)
class _Says:
    known: str

    async def reply(self, said: str) -> str | None:
        return f"Yes, please. {self.known}" if "?" in said else None


class Desk(Dialogue):
    """Serve a customer of a shop by the shop's rules, on a database with 1000 orders.

    Args:
        data: folder with tau2-bench's retail files; by default tools/tau_retail below the folder
            that the environment variable AGENTRL_DATA names.
    """

    id: ClassVar[str] = "desk-v0"
    limits = Limits(turns=40, tool_calls=60, wall_s=900, episode_tokens=16384)
    user: User = Caller()

    def __init__(self, data: str = "") -> None:
        if not isinstance(data, str):
            raise ConfigError(f"desk-v0: data={data!r} must be the path of a folder")
        self._data = data
        self.verifier = self.verdict

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """The tasks of a split, in the order of the files."""
        if split not in ("train", "test"):
            raise ConfigError(f"desk-v0: split={split!r} must be 'train' or 'test'")
        yield from self._retail().tasks[split]

    def prompt(self) -> list[Message]:
        """The shop's rules and what the customer says first."""
        return [Message.system(self._retail().policy), Message.user(self.task.instruction)]

    async def setup(self) -> None:
        """Open a fresh shop; what the reference changes may change."""
        self.shop = self._new_shop()
        self.writes = WriteSet(state=tuple(self.task.metadata["changed"]))

    def state(self) -> Mapping[str, Any]:
        """Users and orders: the customer's whole, every other row by its digest."""
        return self.shop.rows_of(self.task.metadata["customer"])

    async def verdict(self, submission: Submission) -> Score:
        """Whether the database is as the reference leaves it; see `agentrl.envs.desk.verdict`."""
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
            user_id: as in sara_doe_496.
        """
        return self.shop.user(user_id)

    @tool
    def get_order_details(self, order_id: str) -> Row:
        """Show an order: items, status, address, payments.

        Args:
            order_id: with its #, as in #W0000000.
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
        """Work out an expression of numbers, + - * / and brackets.

        Args:
            expression: as in 2 * (3.5 + 1).
        """
        return calculate(expression)

    @tool(effect="irreversible")
    def cancel_pending_order(self, order_id: str, reason: Reason) -> Row:
        """Cancel a pending order and refund it. Needs the customer's explicit confirmation.

        Args:
            order_id: with its #, as in #W0000000.
            reason: the customer's.
        """
        return self.shop.cancel_pending_order(order_id, reason)

    @tool(effect="write")
    def modify_pending_order_address(  # noqa: PLR0913 - an address has six parts
        self,
        order_id: str,
        address1: str,
        address2: str,
        city: str,
        state: str,
        country: str,
        zip: str,
    ) -> Row:
        """Change where a pending order goes. Needs the customer's explicit confirmation.

        Args:
            order_id: with its #, as in #W0000000.
            address1: street and number.
            address2: what else belongs to it, as Suite 12; may be empty.
            state: as in CA.
            country: as in USA.
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
    def modify_user_address(  # noqa: PLR0913 - an address has six parts
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
            user_id: as in sara_doe_496.
            address1: street and number.
            address2: what else belongs to it, as Suite 12; may be empty.
            state: as in CA.
            country: as in USA.
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
            order_id: with its #, as in #W0000000.
            payment_method_id: one of the customer's, as in gift_card_0000000.
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
            order_id: with its #, as in #W0000000.
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
            order_id: with its #, as in #W0000000.
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
            order_id: with its #, as in #W0000000.
            item_ids: all items to be exchanged, each as often as it is to be exchanged.
            new_item_ids: for each of them, in the same order, a variant of the same product.
            payment_method_id: pays or receives the difference in price.
        """
        return self.shop.exchange_delivered_order_items(
            order_id, item_ids, new_item_ids, payment_method_id
        )

    @tool(effect="write")
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the customer over to a human agent, where the rules leave no other way.

        Args:
            summary: what the customer needs.
        """
        return "Transfer successful"

    def _retail(self) -> Retail:
        return read_retail(given_folder(self.id, self._data, FOLDER, FILES))

    def _new_shop(self) -> Shop:
        return Shop(self._retail().tables)
