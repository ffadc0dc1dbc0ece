"""How many shards the tracker has where the settings say `auto`."""

from __future__ import annotations

from pathlib import Path

from conf.settings import Settings, local_path, local_threads

# On a cluster the driver does not know yet how many cores there will be.
_OF_CLUSTER = 2


def with_shard_count(settings: Settings, is_new: bool = False) -> Settings:
    """Returns settings with a number in place of `tracker.shards: auto`.

    The number of an existing checkpoint stays. A new one gets a shard for two cores: each shard has its price in each
    batch, so on two cores one costs less than two do.

    Args:
        settings: of the job. Those that have a number are returned as they are.
        is_new: whether the checkpoint is about to be made anew, whatever is there.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    if settings.tracker.shards != "auto":
        return settings
    threads = local_threads(settings.spark.master)
    number = (None if is_new else _known(settings)) or (_OF_CLUSTER if threads is None else max(1, threads // 2))
    tracker = settings.tracker.model_copy(update={"shards": number})
    return settings.model_copy(update={"tracker": tracker})


def _known(settings: Settings) -> int | None:
    from streaming.checkpoint.checkpoint import Checkpoint
    from streaming.checkpoint.prepared import PreparedState  # a start with a number needs neither before Spark's JVM

    folder = Path(local_path(settings.checkpoint))
    prepared = PreparedState(folder)
    return Checkpoint(folder).shards or (prepared.shards if prepared.is_there else None)
