"""What is kept on disk: episodes and metrics as JSON lines, and task files."""

from agentrl.records.files import (
    EpisodeWriter,
    MetricsWriter,
    iter_episodes,
    read_episodes,
    read_metrics,
)

__all__ = ["EpisodeWriter", "MetricsWriter", "iter_episodes", "read_episodes", "read_metrics"]
