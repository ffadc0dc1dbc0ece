"""Remembers producers that took another name, because under theirs a message would be lost.

A broker with deduplication drops messages whose sequence id is not above the producer's last one. Anybody who may
produce to a destination can publish under any producer name, with a high sequence id. Then the broker would drop all
messages that the job sends under that name, and confirm them. So it does with a message of which it has some chunks
only, and counts it as published, because it has loaded the topic again since.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from conf.settings import Settings, local_path
from status.alerts import FOREIGN_PRODUCER, Alerts
from streaming.release.attempt import FailedProducer, Generation
from warehouse.durable import write_durably

_log = logging.getLogger(__name__)

# Inside the query's folder, to be removed with it: the job of another checkpoint has other names anyway.
NAMES_FILE = Path("query/producer_names.json")


def read_generations(checkpoint: Path) -> dict[tuple[str, str], Generation]:
    """Reads the generations of producers that have taken another name, by topic and the producer's name in the plan.

    Args:
        checkpoint: the checkpoint's folder.
    """
    file = checkpoint / NAMES_FILE
    known = json.loads(file.read_text()) if file.exists() else []
    return {(topic, name): Generation(number, tick) for topic, name, number, tick in known}


def _needs_another(failed: FailedProducer) -> bool:
    return failed.foreign_id is not None or failed.is_partly_sent


class ProducerNames:
    """Gives producers other names. A name is in a file of the checkpoint before it is used. Thread-safe.

    Args:
        settings: of the job.
        alerts: records foreign producers.
        check_epoch: raises FencedError if another job has taken the warehouse over.
    """

    def __init__(self, settings: Settings, alerts: Alerts, check_epoch: Callable[[], object]) -> None:
        self._check_epoch = check_epoch
        checkpoint = Path(local_path(settings.checkpoint))
        self._file = checkpoint / NAMES_FILE
        self._alerts = alerts
        self._lock = threading.Lock()
        self._generations = read_generations(checkpoint)

    @property
    def generations(self) -> dict[tuple[str, str], Generation]:
        """The generations of producers that have taken another name, by topic and the producer's name in the plan."""
        with self._lock:
            return dict(self._generations)

    def renew(self, failed: list[FailedProducer], tick: int) -> list[FailedProducer]:
        """Gives another name to producers under whose name a message would be lost; returns the other ones.

        Args:
            failed: the failed producers.
            tick: messages of releases up to this tick may have been sent under the earlier name.

        Raises:
            FencedError: another job has taken the warehouse over: it is who has published under the name.
        """
        if any(one.foreign_id is not None for one in failed):
            self._check_epoch()
        with self._lock:
            renamed = [one for one in failed if _needs_another(one)]
            for one in renamed:
                key = (one.topic, one.producer)
                number = self._generations.get(key, Generation(0, 0)).number + 1
                self._generations[key] = Generation(number, tick)
                _log.warning("%s: %s; it goes on as %s-%d", one.topic, one.reason, one.producer, number)
                if one.foreign_id is not None:
                    text = f"{one.reason}: nothing is lost, but whoever it was may produce there"
                    self._alerts.begin(FOREIGN_PRODUCER, one.topic, text)
            if renamed:
                self._write()
        return [one for one in failed if not _needs_another(one)]

    def _write(self) -> None:
        content = [[*key, value.number, value.tick] for key, value in sorted(self._generations.items())]
        write_durably(self._file, json.dumps(content))
