"""The bank of inject-v0: tools over an account, standing payments, files and personal data."""

from __future__ import annotations

from typing import Any

from agentrl.tools import tool

Row = dict[str, Any]


class Banking:
    """Tools of a bank. What leaves for the bank cannot be called back, so no change is a `write`.

    Attributes:
        world: what the tools show and change, as `agentrl.envs.inject.worlds` reads it.
    """

    world: dict[str, Any]

    @tool
    def get_balance(self) -> str:
        """Show the balance of the account."""
        return f"{self._account['balance']:.2f}"

    @tool
    def get_transactions(self) -> list[Row]:
        """Show all transactions of the account, the oldest first."""
        rows: list[Row] = self._account["transactions"]
        return rows

    @tool
    def get_scheduled_transactions(self) -> list[Row]:
        """Show the payments that are still to come, with their ids."""
        rows: list[Row] = self._account["scheduled_transactions"]
        return rows

    @tool
    def read_file(self, path: str) -> str:
        """Show a file of the user's.

        Args:
            path: its name.
        """
        text: str = self.world["filesystem"]["files"][path]
        return text

    @tool
    def get_user_info(self) -> Row:
        """Show the user's name and address as the bank has them."""
        return {name: text for name, text in self._user.items() if name != "password"}

    @tool(effect="irreversible")
    def send_money(self, recipient: str, amount: float, subject: str, date: str) -> str:
        """Transfer money from the account.

        Args:
            recipient: IBAN.
            date: as in 2022-04-30.
        """
        self._account["transactions"].append(
            {"id": self._next_id(), **_payment("me", recipient, amount, subject, date)}
        )
        self._account["balance"] -= amount
        return f"{amount:.2f} went to {recipient}"

    @tool(effect="irreversible")
    def schedule_transaction(
        self, recipient: str, amount: float, subject: str, date: str, recurring: bool
    ) -> str:
        """Enter a payment that is still to come.

        Args:
            recipient: IBAN.
            date: of the first payment, as in 2022-04-30.
            recurring: whether it is paid every month.
        """
        sender = self._account["iban"]
        row = _payment(sender, recipient, amount, subject, date) | {"recurring": recurring}
        self._account["scheduled_transactions"].append({"id": self._next_id(), **row})
        return f"{amount:.2f} will go to {recipient}"

    @tool(effect="irreversible")
    def update_scheduled_transaction(
        self,
        id: int,
        recipient: str | None = None,
        amount: float | None = None,
        subject: str | None = None,
        date: str | None = None,
    ) -> str:
        """Change a payment that is still to come; what is left out stays as it is.

        Args:
            id: of the scheduled transaction.
            recipient: IBAN.
            date: as in 2022-04-30.
        """
        given = {"recipient": recipient, "amount": amount, "subject": subject, "date": date}
        row = next(
            (row for row in self._account["scheduled_transactions"] if row["id"] == id), None
        )
        if row is None:
            raise ValueError(f"no scheduled transaction has id {id}")
        row |= {name: value for name, value in given.items() if value is not None}
        return f"scheduled transaction {id} was changed"

    @tool(effect="irreversible")
    def update_user_info(
        self,
        first_name: str | None = None,
        last_name: str | None = None,
        street: str | None = None,
        city: str | None = None,
    ) -> str:
        """Change the name or address that the bank has; what is left out stays as it is."""
        given = {
            "first_name": first_name,
            "last_name": last_name,
            "street": street,
            "city": city,
        }
        self._user.update({name: text for name, text in given.items() if text is not None})
        return "the personal data were changed"

    @tool(effect="irreversible")
    def update_password(self, password: str) -> str:
        """Change the password of the account."""
        self._user["password"] = password
        return "the password was changed"

    @property
    def _account(self) -> Row:
        account: Row = self.world["bank_account"]
        return account

    @property
    def _user(self) -> Row:
        user: Row = self.world["user_account"]
        return user

    def _next_id(self) -> int:
        rows = self._account["transactions"] + self._account["scheduled_transactions"]
        return max(int(row["id"]) for row in rows) + 1


def _payment(sender: str, recipient: str, amount: float, subject: str, date: str) -> Row:
    return {
        "sender": sender,
        "recipient": recipient,
        "amount": amount,
        "subject": subject,
        "date": date,
        "recurring": False,
    }
