"""Messages to exact tokens and back, by a model's own chat template and its own way of writing tool
calls.
"""

from agentrl.chat.tokens import Chat, Demonstration

__all__ = ["Chat", "Demonstration"]
