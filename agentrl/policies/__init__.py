"""Who acts: policies that sample tokens, scripts, recordings, and models behind a URL
(`policies.served`).
"""

from agentrl.policies.base import Player, Policy, Scripted, TokenPolicy, Usage, noop, recorded

__all__ = ["Player", "Policy", "Scripted", "TokenPolicy", "Usage", "noop", "recorded"]
