"""The tools of inject-v0: a bank account, a chat, and pages of the web."""

from __future__ import annotations

from typing import Any

from agentrl.tools import tool

Row = dict[str, Any]
USER = "Emma"


class Banking:
    """Tools of a bank. Nothing sent to the bank can be recalled, so no change is a plain `write`.

    Attributes:
        world: the state that the tools show and change, as read by `agentrl.envs.inject.worlds`.
    """

    world: dict[str, Any]

    @tool
    def get_balance(self) -> str:
        """Show the balance of the account."""
        return f"{self._account['balance']:.2f}"

    @tool
    def get_transactions(self) -> list[Row]:
        """Show all transactions of the account, oldest first."""
        rows: list[Row] = self._account["transactions"]
        return rows

    @tool
    def get_scheduled_transactions(self) -> list[Row]:
        """Show the scheduled payments with their ids."""
        rows: list[Row] = self._account["scheduled_transactions"]
        return rows

    @tool
    def read_file(self, path: str) -> str:
        """Show one of the user's files.

        Args:
            path: its name.
        """
        text: str = self.world["filesystem"]["files"][path]
        return text

    @tool
    def get_user_info(self) -> Row:
        """Show the user's name and address on file at the bank."""
        return {name: text for name, text in self._user.items() if name != "password"}

    @tool(effect="irreversible")
    def send_money(self, recipient: str, amount: float, subject: str, date: str) -> str:
        """Transfer money from the account.

        Args:
            recipient: IBAN.
            date: for example 2022-04-30.
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
        """Schedule a payment.

        Args:
            recipient: IBAN.
            date: of the first payment, for example 2022-04-30.
            recurring: whether to repeat it every month.
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
        """Change a scheduled payment; omitted fields stay as they are.

        Args:
            id: of the scheduled transaction.
            recipient: IBAN.
            date: for example 2022-04-30.
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
        """Change the name or address on file; omitted fields stay as they are."""
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


class Slack:
    """Tools of a chat and of the web. Whatever others can see has the effect `network`.

    Attributes:
        world: the state that the tools show and change, as read by `agentrl.envs.inject.worlds`.
    """

    world: dict[str, Any]

    @tool
    def get_channels(self) -> list[str]:
        """Show the names of all channels."""
        names: list[str] = self._chat["channels"]
        return names

    @tool
    def get_users_in_channel(self, channel: str) -> list[str]:
        """Show the members of a channel."""
        return [user for user, names in self._chat["user_channels"].items() if channel in names]

    @tool
    def read_channel_messages(self, channel: str) -> list[Row]:
        """Show the messages of a channel, oldest first."""
        self._check("channels", channel)
        rows: list[Row] = self._chat["channel_inbox"].get(channel, [])
        return rows

    @tool
    def read_inbox(self, user: str) -> list[Row]:
        """Show the direct messages a user received, oldest first."""
        self._check("users", user)
        rows: list[Row] = self._chat["user_inbox"].get(user, [])
        return rows

    @tool(effect="network")
    def get_webpage(self, url: str) -> str:
        """Show a web page."""
        pages = self.world["web"]["web_content"]
        if url not in pages:
            raise ValueError(f"no page is at {url}")
        return str(pages[url])

    @tool(effect="network")
    def post_webpage(self, url: str, content: str) -> str:
        """Publish text on a web page."""
        self.world["web"]["web_content"][url] = content
        return f"the page {url} was written"

    @tool(effect="network")
    def send_direct_message(self, recipient: str, body: str) -> str:
        """Send a message to one user."""
        self._check("users", recipient)
        row = {"sender": USER, "recipient": recipient, "body": body}
        self._chat["user_inbox"].setdefault(recipient, []).append(row)
        return f"the message went to {recipient}"

    @tool(effect="network")
    def send_channel_message(self, channel: str, body: str) -> str:
        """Post a message in a channel."""
        self._check("channels", channel)
        row = {"sender": USER, "recipient": channel, "body": body}
        self._chat["channel_inbox"].setdefault(channel, []).append(row)
        return f"the message went to the channel {channel}"

    @tool(effect="network")
    def add_user_to_channel(self, user: str, channel: str) -> str:
        """Add a user to a channel."""
        self._check("users", user)
        self._check("channels", channel)
        self._chat["user_channels"].setdefault(user, []).append(channel)
        return f"{user} is now in {channel}"

    @tool(effect="network")
    def invite_user(self, user: str, email: str) -> str:
        """Invite a new user to the chat by email."""
        if user in self._chat["users"]:
            raise ValueError(f"{user} is here already")
        self._chat["users"].append(user)
        self._chat["invitations"][user] = email
        return f"{user} was invited by {email}"

    @tool(effect="irreversible")
    def remove_user(self, user: str) -> str:
        """Remove a user from the chat, along with the messages they received."""
        self._check("users", user)
        self._chat["users"].remove(user)
        for table in ("user_channels", "user_inbox"):
            self._chat[table].pop(user, None)
        return f"{user} was removed"

    @property
    def _chat(self) -> Row:
        chat: Row = self.world["slack"]
        return chat

    def _check(self, table: str, name: str) -> None:
        if name not in self._chat[table]:
            raise ValueError(f"{name} is not one of the {table}")
