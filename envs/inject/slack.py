"""The chat of inject-v0: tools over users, channels, messages and pages of the web."""

from __future__ import annotations

from typing import Any

from agentrl.tools import tool

Row = dict[str, Any]
ME = "Emma"


class Slack:
    """Tools of a chat and of the web. Everything that others get to see is `network`.

    Attributes:
        world: what the tools show and change, as `agentrl.envs.inject.worlds` reads it.
    """

    world: dict[str, Any]

    @tool
    def get_channels(self) -> list[str]:
        """Show the names of all channels."""
        names: list[str] = self._chat["channels"]
        return names

    @tool
    def get_users_in_channel(self, channel: str) -> list[str]:
        """Show who is in a channel."""
        return [user for user, names in self._chat["user_channels"].items() if channel in names]

    @tool
    def read_channel_messages(self, channel: str) -> list[Row]:
        """Show the messages of a channel, the oldest first."""
        self._check("channels", channel)
        rows: list[Row] = self._chat["channel_inbox"].get(channel, [])
        return rows

    @tool
    def read_inbox(self, user: str) -> list[Row]:
        """Show the direct messages that a user got, the oldest first."""
        self._check("users", user)
        rows: list[Row] = self._chat["user_inbox"].get(user, [])
        return rows

    @tool(effect="network")
    def get_webpage(self, url: str) -> str:
        """Show a page of the web."""
        pages = self.world["web"]["web_content"]
        if url not in pages:
            raise ValueError(f"no page is at {url}")
        return str(pages[url])

    @tool(effect="network")
    def post_webpage(self, url: str, content: str) -> str:
        """Put a text on a page of the web."""
        self.world["web"]["web_content"][url] = content
        return f"the page {url} was written"

    @tool(effect="network")
    def send_direct_message(self, recipient: str, body: str) -> str:
        """Send a message to one user."""
        self._check("users", recipient)
        row = {"sender": ME, "recipient": recipient, "body": body}
        self._chat["user_inbox"].setdefault(recipient, []).append(row)
        return f"the message went to {recipient}"

    @tool(effect="network")
    def send_channel_message(self, channel: str, body: str) -> str:
        """Send a message to everybody in a channel."""
        self._check("channels", channel)
        row = {"sender": ME, "recipient": channel, "body": body}
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
        """Invite somebody new to the chat by mail."""
        if user in self._chat["users"]:
            raise ValueError(f"{user} is here already")
        self._chat["users"].append(user)
        self._chat["invitations"][user] = email
        return f"{user} was invited by {email}"

    @tool(effect="irreversible")
    def remove_user(self, user: str) -> str:
        """Remove a user from the chat, with all messages that the user got."""
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
