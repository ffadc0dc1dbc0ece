"""Watches the source topics, and reports missing entries and topics that stand still."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from broker.client import NoAnswerError, PulsarError
from broker.clusters.new_cluster import never_had
from broker.entries.continuity import CameEntry, Continuity, Gap, missing_ranges
from broker.position import START, Position, SourceTopic
from broker.pulsar_admin.admin_rest import AdminClient
from broker.pulsar_admin.topic_questions import TopicQuestions
from conf.settings import Settings
from status.alerts import NO_ADMIN, NOT_SEEN, STANDING, SUBSCRIPTION_RESET, Alerts
from status.internal_errors import InternalErrors
from streaming.source.receiving.receiver import Receiver
from streaming.source.watch.beginnings import Beginning, Beginnings
from streaming.source.watch.stalled_topics import StalledTopics
from streaming.source.watch.subscription_places import SubscriptionPlaces
from streaming.source.watch.undecided_gaps import SourceGap, UndecidedGaps
from warehouse.delta.tables import Tables
from warehouse.unseen_entries import NotDurableError, durable_index, find_not_seen, record

_log = logging.getLogger(__name__)

_WATCHING = "watching the source topics"  # in the log and in alerts
_LOOK_SECONDS = 10.0
_LOOKS_A_SECOND = 20  # the most topic partitions that are looked at in a second, to spare the broker's admin API
_TIMEOUT_SECONDS = 5.0
_MAX_PARTS = 100  # the most entries at the end of a topic that are looked at, one by one
_PLACE_MILLIS = 60_000  # how often the broker is asked up to where a topic partition is acknowledged
_GAPS_AT_ONCE = 100  # the most gaps that are decided before topics are looked at again


class SourceWatch:
    """A thread beside the receivers that asks the broker's admin API about their topic partitions.

    A gap does not close later: the broker sends entries to an exclusive consumer in order, and begins again after the
    last acknowledged one after a reconnection. So the watch asks the broker at once which entries of a gap exist, and
    writes them to `rejects`, long before the entries after them are acknowledged. Where the broker does not answer, the
    watch asks again, also in the next run.

    Args:
        settings: of the job.
        alerts: records topics that stand still, entries that were not seen, and an admin API that does not answer.
        receivers: returns the present receivers.
        why_not_taking: returns why batches take no messages now; None: they do.
        tables: of the warehouse; `rejects` gets the entries that were not seen.
    """

    def __init__(
        self,
        settings: Settings,
        alerts: Alerts,
        receivers: Callable[[], Sequence[Receiver]],
        why_not_taking: Callable[[], str | None],
        tables: Tables,
    ) -> None:
        self._subscription = settings.pulsar.subscription
        self._control_topic = settings.control.topic
        self._alerts = alerts
        self._errors = InternalErrors(alerts)
        self._receivers = receivers
        self._why_not_taking = why_not_taking
        self._admin = AdminClient(settings.pulsar, _TIMEOUT_SECONDS)
        self._tables = tables
        self._standing = StalledTopics()
        self._gaps = UndecidedGaps(settings)
        self._beginnings = Beginnings(settings)
        self._places = SubscriptionPlaces(settings)
        self._place_asked_at: dict[str, int] = {}  # ms since the epoch, by topic partition
        self._counts: dict[str, int] = defaultdict(int)  # number of entries that were not seen, by topic partition
        self._turns: dict[str, int] = {}  # how many turns there had been by the last look, by topic partition
        self._without_room: dict[str, Position] = {}  # the last entry received, by topic partition
        self._ends_asked: dict[str, Position] = {}  # the entry up to which gaps were noted, by topic partition
        self._continuity: dict[str, Continuity] = {}
        self._durable: Mapping[str, str] | None = None  # as `durable_through`; None: nothing was told yet
        self._wake = threading.Event()
        if self._gaps:
            self._wake.set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch source topics", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits some seconds for it."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_TIMEOUT_SECONDS)
        self._admin.close()

    def follow(self, source: SourceTopic, after: Position) -> Callable[[Sequence[CameEntry]], None]:
        """Begins to look for gaps in a topic partition.

        Args:
            source: the topic partition.
            after: the last entry of earlier runs; START: there is none.

        Returns:
            a function to call with all entries that come in from the topic partition: see `Receiver`'s `on_entries`.
        """
        self._continuity[source.name] = Continuity(after)
        return functools.partial(self._came_in, source)

    def begin(self, source: SourceTopic) -> None:
        """Notes where a topic partition begins for the job. Call it after `follow`, before opening the consumer.

        Call it again when the consumer is open, for a topic that was not there before. The client acknowledges entries
        that it can't read, and the broker expired ones. So later the first entry of a topic that was never read could
        not be found out.

        Raises:
            PulsarError: the broker does not answer.
        """
        continuity = self._continuity[source.name]
        if continuity.last != START:
            return
        beginning = self._beginnings.get(source.name)
        if beginning is None or self._is_of_another_cluster(source.name, beginning.position):
            questions = TopicQuestions(self._admin, self._subscription)
            position = questions.begin(source.name)
            if position == START:
                return
            try:
                index = questions.index_up_to(source.name, position)
            except PulsarError as error:
                _log.debug("%s: the index at its beginning is not known: %s", source.name, error)
                index = None
            beginning = Beginning(position, index)
            self._beginnings.keep(source.name, beginning)
        continuity.begin_after(beginning.position, beginning.index)

    def _is_of_another_cluster(self, name: str, position: Position) -> bool:
        stats = self._admin.internal_stats(name)
        return stats is not None and never_had(stats, position)

    def _came_in(self, source: SourceTopic, entries: Sequence[CameEntry]) -> None:
        if gaps := self._continuity[source.name].gaps_of(entries):
            self._add(source, gaps)

    def _add(self, source: SourceTopic, gaps: Sequence[Gap]) -> None:
        self._gaps.add((source, gap) for gap in gaps)
        self._wake.set()

    def passed(self, source: SourceTopic, end: Position) -> None:
        """Notes that a topic partition sends no more entries up to `end`: those that have not come are missing."""
        name = source.name
        continuity = self._continuity[name]
        asked = self._ends_asked.get(name, START)
        last, index = (asked, None) if asked > continuity.last else (continuity.last, continuity.last_index)
        if START < last < end:
            self._ends_asked[name] = end
            self._add(source, [Gap(last, end.next, index)])

    def durable_through(self, positions: Mapping[str, str]) -> None:
        """Notes by topic partition, also of those that are not read any more, the entry up to which all are durable."""
        self._durable = positions
        if self._gaps:
            self._wake.set()

    def _run(self) -> None:
        next_look = time.monotonic() + _LOOK_SECONDS
        while not self._stopped.is_set():
            self._wake.wait(max(0.0, next_look - time.monotonic()))
            self._wake.clear()
            try:
                self.decide_gaps()
                if time.monotonic() >= next_look:
                    self.look(time.time_ns() // 1_000_000)
                    self._errors.succeeded(_WATCHING)
            except Exception as error:  # the watch ends with the job alone
                _log.warning("%s: %s: %s; trying again", _WATCHING, type(error).__name__, error)
                if not self._stopped.is_set():
                    self._errors.note(_WATCHING, error)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS

    def decide_gaps(self) -> None:
        """Asks the broker about the first gaps, and writes their missing entries to `rejects`.

        A gap for which there is no answer goes behind the others, so that it holds up none.
        """
        self._gaps.write()
        gaps = self._gaps.first(_GAPS_AT_ONCE)
        if not gaps:
            return
        decided: list[SourceGap] = []
        failed: list[SourceGap] = []
        for source in dict.fromkeys(source for source, _ in gaps):
            of_source = [gap for other, gap in gaps if other == source]
            found, open_gaps, error = self._decide(source, of_source)
            decided += [(source, gap) for gap in found]
            failed += [(source, gap) for gap in open_gaps]
            if error is not None:
                first, last = min(gap.after for gap in of_source), max(gap.before for gap in of_source)
                text = f"entries between {first} and {last} did not come, and why is not known yet: {error}"
                self._alerts.begin(NOT_SEEN, source.name, text, count=max(1, self._counts[source.name]))
                _log.warning("%s: %s; trying again", source.name, text)
        self._gaps.remove(decided, failed)
        if self._gaps and not failed:
            self._wake.set()
        left = self._gaps.sources()
        for source in {source for source, _ in decided} - left:
            if not self._counts[source.name]:
                self._alerts.end(NOT_SEEN, source.name)

    def _decide(self, source: SourceTopic, gaps: Sequence[Gap]) -> tuple[list[Gap], list[Gap], Exception | None]:
        """Decides gaps of a topic partition.

        Returns:
            (gaps that are decided, gaps that are not, why not).
        """
        found: list[Gap] = []
        failed: list[Gap] = []
        tables: list[pa.Table] = []
        error: Exception | None = None
        index_of = functools.partial(self._index_of, source)
        for gap in gaps:
            try:
                tables.append(find_not_seen(self._admin, source, gap, index_of).rows)
                found.append(gap)
            except PulsarError as broker_error:
                failed.append(gap)
                error = broker_error
                break  # the next round begins with the other gaps
            except NotDurableError as not_durable:
                if not_durable.gap is not None:
                    self._gaps.replace(source, gap, not_durable.gap)
                failed.append(not_durable.gap or gap)
                error = not_durable
            except Exception as gap_error:
                failed.append(gap)
                error = gap_error
        try:
            if found:
                rows = pa.concat_tables(tables)
                if n := record(self._tables, source, rows):
                    self._counts[source.name] += n
                    self._tell(source, rows)
        except Exception as table_error:
            return [], [*found, *failed], table_error
        return found, failed, error

    def _tell(self, source: SourceTopic, rows: pa.Table) -> None:
        n = self._counts[source.name]
        last, reason = rows["position"][-1].as_py(), rows["reason"][-1].as_py()
        text = f"{n:,} {'entry was' if n == 1 else 'entries were'} not seen, see rejects; the last one {last}, {reason}"
        self._alerts.begin(NOT_SEEN, source.name, text, count=n)
        _log.error("%s: %s", source.name, text)

    def _index_of(self, source: SourceTopic, position: Position) -> int | None:
        is_all = self._is_all(source.name, position)  # before the question: it may become durable meanwhile
        try:
            return durable_index(self._tables, source, position)
        except NotDurableError:
            if is_all:
                return None
            raise

    def _is_all(self, name: str, position: Position) -> bool:
        """Whether the tables have an entry of a topic partition already, or it was never seen and they never will."""
        durable = self._durable
        if durable is not None and position <= Position.parse(durable.get(name, str(START))):
            return True
        beginning = self._beginnings.get(name)
        if beginning is not None and position <= beginning.position:
            return True
        continuity = self._continuity.get(name)
        if continuity is None:  # the topic is not read any more
            return durable is not None
        return continuity.last < position <= self._ends_asked.get(name, START)

    def look(self, now: int) -> None:
        """Looks at every topic partition: whether it stands still, and whether entries are missing at its end.

        Args:
            now: ms since the epoch.
        """
        for receiver in self._receivers():
            if self._stopped.wait(1 / _LOOKS_A_SECOND):
                return
            try:
                self._look_at(receiver, now)
            except PulsarError as error:
                self._alerts.begin(NO_ADMIN, self._admin.url, f"source topics can't be watched: {error}")
                return
        self._places.write()
        self._alerts.end(NO_ADMIN, self._admin.url)

    def _look_at(self, receiver: Receiver, now: int) -> None:
        name = receiver.source.name
        taken = receiver.last_in_batch
        backlog = self._admin.backlog(name, self._subscription)
        if now - self._place_asked_at.get(name, 0) >= _PLACE_MILLIS:
            self._look_at_subscription(name, now)
            self._place_asked_at[name] = now
        try:
            end = receiver.topic_end()
        except PulsarError:
            end = None
        if end is not None and not backlog:
            self._check_end(receiver, end)
        if end is not None and backlog:
            receiver.acknowledge_again(end)  # an acknowledgement may be lost with the connection
        self._look_for_room(receiver, backlog)
        has_more = end is None or (bool(backlog) and end > taken)
        since = self._standing.look(name, taken, has_more and not self._has_turns_before(receiver), now)
        if since is None or (end is not None and self._is_only_parts(receiver, end)):
            self._alerts.end(STANDING, name)
        else:
            why = f"none was taken in: {self._why(receiver)}"
            self._alerts.begin(STANDING, name, f"messages wait, and {why}" if backlog else why, since)

    def _look_for_room(self, receiver: Receiver, backlog: int | None) -> None:
        """Connects a receiver again that the broker wrongly takes for full in two looks.

        The broker counts how many messages it may send. Should its count ever be another than the consumer's, no more
        would come. In a single look an entry may just be on its way to the consumer.
        """
        name, last = receiver.source.name, receiver.last_received
        if not backlog or not receiver.is_idle or self._admin.has_room(name, self._subscription):
            self._without_room.pop(name, None)
        elif self._without_room.get(name) != last:
            self._without_room[name] = last
        else:
            del self._without_room[name]
            receiver.connect_again()

    def _has_turns_before(self, receiver: Receiver) -> bool:
        """Whether a receiver waits for its turn, and others have had theirs since the last look."""
        name, n_turns = receiver.source.name, receiver.n_turns
        before, self._turns[name] = self._turns.get(name, n_turns), n_turns
        return receiver.waits_for_turn and n_turns > before

    def _look_at_subscription(self, name: str, now: int) -> None:
        """Notices that somebody has deleted the job's subscription of a topic partition, or reset it."""
        stats = self._admin.internal_stats(name)
        if stats is None or self._subscription not in stats.acknowledged:
            return
        place = Position(*stats.acknowledged[self._subscription])
        before = self._places.look(name, place, now)
        if before is None:
            return
        again = sum(last - first + 1 for _, first, last in missing_ranges(Gap(place, before.next), stats.ledgers))
        if not again:
            return  # the same place in other words: the end of a ledger, or the beginning of the next one
        text = (
            f"the job's subscription {self._subscription} went back from {before} to {place}: it was deleted or reset; "
            f"{again:,} entries come again, and are not delivered again"
        )
        self._alerts.begin(SUBSCRIPTION_RESET, name, text)
        _log.error("%s: %s", name, text)

    def _is_only_parts(self, receiver: Receiver, end: Position) -> bool:
        """Whether the waiting entries are no messages, such as chunks of a message whose producer ended in between."""
        name = receiver.source.name
        last = max(receiver.last_received, self._continuity[name].last)
        if receiver.waiting or last.ledger_id != end.ledger_id or end.entry_id - last.entry_id > _MAX_PARTS:
            return False
        entries = (self._admin.entry_metadata(name, *Position(last.ledger_id, n)) for n in _after(last, end))
        try:
            return all(entry is not None and entry.is_no_message for entry in entries)
        except NoAnswerError:
            return False

    def _why(self, receiver: Receiver) -> str:
        if receiver.problem is not None:
            return receiver.problem
        if receiver.source.topic != self._control_topic and (why := self._why_not_taking()) is not None:
            return why
        if receiver.waiting:
            return "they have come in, and no batch takes them"
        if receiver.waits_for_turn:
            return "all receivers together hold as many bytes as they may, and no batch takes them"
        return "the broker hands over none"

    def _check_end(self, receiver: Receiver, end: Position) -> None:
        """Notes entries at the end that are acknowledged but never came in, because the client can't read them."""
        name = receiver.source.name
        if not START < self._continuity[name].last < end or self._ends_asked.get(name) == end:
            return
        # Only entries that were published before the question for the end may count. So the backlog is asked for again
        # after that question, and the entries that have come in are looked at last.
        if self._admin.backlog(name, self._subscription) == 0:
            self.passed(receiver.source, end)


def _after(last: Position, end: Position) -> range:
    """Returns the entry ids after `last` up to `end`, of one ledger."""
    return range(last.entry_id + 1, end.entry_id + 1)
