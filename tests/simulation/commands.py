"""What users ask for in a simulation: commands on the control topic, in every order and form."""

from __future__ import annotations

import random
from collections.abc import Callable

from broker.position import Position
from broker.protocol.building import OutgoingMessage, single_entry
from conf.partitions import partition_name
from conf.settings import Settings
from tests.simulation.accounts import Account, Command
from tests.simulation.broker import Cluster, as_replicated
from tests.simulation.expected import entry_of
from tests.simulation.filtering import Asked, named_by
from tests.simulation.load import SCHEDULE_KEYS
from tests.simulation.oracle import Oracle
from tests.simulation.replicating import ELSEWHERE
from tests.simulation.scheduler import EPOCH_SECONDS, Scheduler
from tracker.wire.delaylake_pb2 import CancelDelayedMessage, ControlCommand, SkipEntry

_OPERATIONS = (
    *("CANCEL", "CANCEL", "SKIP", "SKIP", "RESCHEDULE", "RESCHEDULE", "DELIVER NOW", "POSTPONE", "POSTPONE"),
    *("RESTORE", "RESTORE", "RETRY", "RETRY", "PAUSE", "RESUME", "AGAIN", "ANOTHER", "BY KEY", "BY KEY"),
    *("OF A SCHEDULE", "OF A SCHEDULE"),
)
_MOST_RETRIES = 3  # of a message; after more it is a dead letter
_AT_ONCE = 0.06  # so many entries are named by a command when they are published
_CANCELLED_NEXT = 12  # entries
_BY_FILTER = 0.06  # so many commands are for all that match a filter
_BY_OWN_FILTER = 0.15  # likewise, where the service finds what matches
_SURELY_WAITS_MILLIS = 9_000  # before it is due nothing is dispatched then
_DELAYS_MILLIS = (0, 500, 3_000, 9_000, 25_000)


class Operators:
    """Send commands until a time, and resume all subscriptions then.

    Args:
        until: seconds.
        per_second: the number of commands.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cluster: Cluster,
        oracle: Oracle,
        settings: Settings,
        until: float,
        per_second: float,
        trace: Callable[[str], None],
    ) -> None:
        self._scheduler, self._cluster = scheduler, cluster
        self._oracle, self._accounts = oracle, oracle.accounts
        self._settings, self._until, self._per_second, self._trace = settings, until, per_second, trace
        self._name = f"commands {scheduler.random.random()}"
        self._random = random.Random(self._name)
        self._n_asked = self._n_published = 0
        self._topic_of = {s.name: route.source for route in settings.routes for s in route.subscriptions}
        self._sent: list[tuple[Command, ControlCommand]] = []
        self._retries: dict[tuple[str, str], int] = {}
        self.by_filter: Callable[[Asked], None] | None = None  # else the accounts say what matches
        self.last_due = 0
        self.share_elsewhere = 0.0  # of the commands, so many are sent in another cluster
        if per_second:
            scheduler.after(2.0, self._ask)

    def move(self, cluster: Cluster) -> None:
        """What they know is lost: they only resume all subscriptions, elsewhere."""
        self._cluster, self._until = cluster, 0.0
        self._scheduler.after(1.0, self._ask)

    def _now(self) -> int:
        return round((EPOCH_SECONDS + self._scheduler.now) * 1000)

    def _ask(self) -> None:
        if self._scheduler.now > self._until:
            for name in self._topic_of:
                self._send("RESUME", [], {name}, 0)
                for position in self._oracle.schedules.of_subscription(name):
                    self._send_schedule("RESUME_SCHEDULE", position, name)
            return
        # What is asked next is drawn before this one: it stays as it is where this one is left out.
        self._scheduler.after(self._random.expovariate(self._per_second), self._ask)
        between = self._random
        for _ in range(between.choice([1, 1, 1, 2, 4])):
            self._n_asked += 1
            self._random = random.Random(f"{self._name} {self._n_asked}")
            if self._cluster.faults.is_done("ask"):
                self._ask_one(self._random.choice(_OPERATIONS))
        self._random = between

    def _ask_one(self, operation: str) -> None:
        chance, now = self._random, self._now()
        name = chance.choice(sorted(self._topic_of))
        most = _BY_FILTER if self.by_filter is None else _BY_OWN_FILTER
        if random.Random(f"{self._name} filter {self._n_asked}").random() < most:
            self._ask_by_filter(name)
            return
        if operation == "AGAIN":
            if self._sent:
                command, message = chance.choice(self._sent[-20:])
                command.n_sent += 1
                self._trace(f"asks {command.id} again")
                self._publish(message)
            return
        if operation in ("PAUSE", "RESUME"):
            self._send(operation, [], {name}, 0)
            return
        if operation == "OF A SCHEDULE":
            self._ask_schedule(name)
            return
        if operation == "ANOTHER":
            self._ask_another(name)
            return
        if operation == "BY KEY":
            operation = chance.choice(["CANCEL", "SKIP", "RESCHEDULE", "POSTPONE"])
            value = chance.choice([700, 5_000, 20_000]) + (0 if operation == "POSTPONE" else now)
            self._send(operation, [], {name}, value, chance.choice(SCHEDULE_KEYS))
            return
        position = self._choose(operation, name)
        if position is not None:
            self._ask_of(operation, name, position)

    def _ask_of(self, operation: str, name: str, position: str) -> None:
        """Sends a command for a message of a subscription, and maybe for others of its entry and topic."""
        chance, now = self._random, self._now()
        ledger, entry, _, index = position.split(":")
        named = [(f"{ledger}:{entry}", -1 if chance.random() < 0.3 else int(index))]
        if operation == "RETRY":
            named = [(f"{ledger}:{entry}", int(index))]
            self._retries[position, name] = self._retries.get((position, name), 0) + 1
        siblings = [n for n, topic in sorted(self._topic_of.items()) if topic == self._topic_of[name]]
        names = set(siblings) if operation != "RETRY" and chance.random() < 0.3 else {name}
        if len(names) > 1 and chance.random() < 0.4:
            names.add("*")  # also those that come later
        if operation == "CANCEL":
            named = [(entry, -1) for entry, _ in named]  # it has no batch index
            account = self._accounts.accounts.get((position, name))
            value = now + 20_000 if account is None or chance.random() < 0.1 else account.due
        elif operation == "POSTPONE":
            value = chance.choice([-30_000, -2_000, 700, 5_000, 20_000])
        elif operation == "DELIVER NOW":
            operation, value = "RESCHEDULE", 0
        else:
            value = now + chance.choice(_DELAYS_MILLIS) + chance.randrange(200)
        self._send(operation, named, names, value)

    def _ask_by_filter(self, name: str) -> None:
        """Names all messages of a subscription that match a filter, as the commands `...-by-filter` do.

        What matches is what the accounts say that waits: with a key, or that is due in a span of time.
        """
        chance, now = self._random, self._now()
        operation = chance.choice(["CANCEL", "SKIP", "RESCHEDULE", "POSTPONE", "RESTORE"])
        key, since = chance.choice(["", "x", "y"]), now + chance.choice([-60_000, 0, _SURELY_WAITS_MILLIS])
        until = since + chance.choice([10_000, 60_000])
        value = chance.choice([700, 5_000, 20_000]) + (0 if operation == "POSTPONE" else now)
        if self.by_filter is not None:
            own = random.Random(f"{self._name} own filter {self._n_asked}")
            if own.random() < 0.6:
                since = until = 0
                key = own.choice(["", "x", "y", "y"])
            self.by_filter(Asked(operation, self._topic_of[name], name, key, since, until, value))
            return
        matching = [
            position
            for (position, of_name), account in self._accounts.accounts.items()
            if of_name == name and since <= account.due < until and account.is_gone == (operation == "RESTORE")
            if not key or self._oracle.expected[position].key == key
        ]
        if operation == "CANCEL":  # it names entries, of which all messages match
            entries = {entry_of(position) for position in matching}
            left = {entry_of(p) for p, n in self._accounts.accounts if n == name and p not in matching}
            named = [(entry, -1) for entry in sorted(entries - left)]
        else:
            named = [(entry_of(position), int(position.rpartition(":")[2])) for position in matching]
        if named:
            self._send(operation, named, {name}, value, sums_up=True)

    def send_made(self, message: ControlCommand) -> None:
        """Publishes a command that the service has made of a filter."""
        kind = message.WhichOneof("operation")
        named = named_by(message)
        value = 0
        if kind in ("cancel", "cancels"):
            kind = "cancel"
            value = min(one.deliver_at for one in [*message.cancels.messages, message.cancel] if one.deliver_at)
        elif kind == "reschedule":
            value = message.reschedule.deliver_at
        elif kind == "postpone":
            value = message.postpone.by_millis
        names = frozenset(message.subscriptions)
        command = Command(
            message.request_id, kind.upper(), message.topic, named, names, value, self._now(), sums_up=message.sum_up
        )
        self.last_due = max(self.last_due, self._now() + 60_000)
        self._accounts.add_command(command)
        self._sent.append((command, message))
        what = " ".join(f"{entry}:{index}" for entry, index in named)
        self._trace(f"asks {command.id} {command.operation} {what} of {','.join(sorted(names))}, {value}")
        self._publish(message)

    def published(self, topic: str, position: str) -> None:
        """A message is in a source topic: somebody may name it at once, when the job may not have it yet."""
        self._n_published += 1
        between, self._random = self._random, random.Random(f"{self._name} published {self._n_published}")
        if self._per_second and self._random.random() < _AT_ONCE and self._cluster.faults.is_done("ask at once"):
            name = self._random.choice([one for one, of in sorted(self._topic_of.items()) if of == topic])
            operation = self._random.choice(["CANCEL", "SKIP", "RESCHEDULE", "POSTPONE"])
            if (position, name) in self._accounts.accounts:
                self._ask_of(operation, name, position)
        self._random = between

    def cancel_next(self, topic: str) -> None:
        """Cancels the messages that come next to a topic."""
        between, self._random = self._random, random.Random(f"{self._name} {topic}")
        if self._per_second and self._cluster.faults.is_done("cancel next"):
            name = self._random.choice([one for one, of in sorted(self._topic_of.items()) if of == topic])
            following = self._following(topic)
            for entry in range(following.entry_id, following.entry_id + _CANCELLED_NEXT):
                self._send("CANCEL", [(f"{following.ledger_id}:{entry}", -1)], {name}, self._now() + 60_000)
        self._random = between

    def _following(self, topic: str) -> Position:
        """Returns where the next entry of a source topic will be, of some partition."""
        names = self._cluster.partition_names(topic)
        chance = random.Random(f"{self._name} {topic} partition {self._n_asked} {self._n_published}")
        return self._cluster.topic(chance.choice(names)).next

    def _account(self, entry: str, index: int, name: str) -> Account | None:
        positions = [one for one in self._accounts.positions_of(entry) if one.endswith(f":{index}")]
        return self._accounts.accounts.get((positions[0], name)) if positions else None

    def _name_partition(self, message: ControlCommand, entries: list[SkipEntry]) -> None:
        """May name the partition of each entry, or, where all are of one, that of the topic."""
        chance = random.Random(f"{self._name} partition {message.request_id}")
        of_entries = [self._accounts.positions_of(f"{one.ledger_id}:{one.entry_id}") for one in entries]
        partitions = [int(positions[0].split(":")[2]) if positions else -1 for positions in of_entries]
        if max(partitions, default=-1) < 0 or chance.random() < 0.5:
            return
        if len({*partitions}) == 1 and chance.random() < 0.5:
            message.topic = partition_name(message.topic, partitions[0])
            return
        for one, partition in zip(entries, partitions, strict=True):
            one.partition = partition

    def _ask_schedule(self, name: str) -> None:
        schedules = [*self._oracle.schedules.of_subscription(name)][-8:]
        if schedules:
            position = self._random.choice(schedules)
            kinds = ["SKIP_NEXT", "SKIP_NEXT", "PAUSE_SCHEDULE", "PAUSE_SCHEDULE", "RESUME_SCHEDULE", "CANCEL"]
            self._send_schedule(self._random.choice(kinds), position, name)

    def _send_schedule(self, operation: str, position: str, name: str) -> None:
        named = [(position.rsplit(":", 2)[0], -1)]
        if operation == "RESUME_SCHEDULE":
            self._oracle.schedules.resumed(position, name, self._now())
        self._send(operation, named, {name}, self._now() + 20_000)

    def _ask_another(self, name: str) -> None:
        """Sends another command under a request id that has come before; it names another message."""
        topic = self._topic_of[name]
        # What is refused whole leaves no request id.
        sent = [
            c
            for c, _ in self._sent[-20:]
            if c.topic == topic and c.operation not in ("RESTORE", "SKIP") and "*" not in c.subscriptions
        ]
        position = self._choose("SKIP", name)
        if not sent or position is None:
            return
        command = self._random.choice(sent)
        entry = entry_of(position)
        command.n_others += 1
        message = ControlCommand(request_id=command.id, topic=topic, subscriptions=sorted(command.subscriptions))
        message.restore.entries.append(_entry(entry, -1))
        self._trace(f"asks {command.id} again, for another: RESTORE {entry} of {','.join(message.subscriptions)}")
        self._publish(message)

    def _choose(self, operation: str, name: str) -> str | None:
        """Returns the position of a message for which a subscription's command may do something; None: there is none.

        One in twelve is of no message, or of one that may come yet.
        """
        chance = self._random
        if operation not in ("RETRY", "POSTPONE") and chance.random() < 0.08:
            following = self._following(self._topic_of[name])
            ahead = chance.choice([0, 1, 4, 20])
            return chance.choice([f"{following.ledger_id}:{following.entry_id + ahead}:-1:-1", "990:3:-1:-1"])
        now = self._now()
        own = [(p, a) for (p, n), a in self._accounts.accounts.items() if n == name][-60:]
        if own and operation not in ("RETRY", "RESTORE") and chance.random() < 0.15:
            return own[-1][0]  # which may not have come to the job
        if operation == "RETRY":
            fitting = [
                p
                for p, a in own
                if (a.came_at or chance.random() < 0.1) and self._retries.get((p, name), 0) < _MOST_RETRIES
            ]
        elif operation == "RESTORE":
            waiting = [p for p, a in own if a.is_gone and a.due > now + 5_000]
            fitting = waiting or [p for p, a in own if a.is_gone or chance.random() < 0.1]
        else:
            fitting = [p for p, a in own if a.due > now - 500 or chance.random() < 0.1]
        return chance.choice(fitting) if fitting else None

    def _send(
        self,
        operation: str,
        named: list[tuple[str, int]],
        names: set[str],
        value: int,
        schedule_key: str = "",
        sums_up: bool = False,
    ) -> None:
        topic = self._topic_of[max(names)]  # names are after "*"
        command = Command(
            f"r{len(self._accounts.commands)}",
            operation,
            topic,
            named,
            frozenset(names),
            value,
            self._now(),
            schedule_key=schedule_key,
            sums_up=sums_up,
        )
        form = random.Random(f"{self._name} form {command.id}")
        command.sums_up |= bool(named) and form.random() < 0.2
        asked = ["*"] if "*" in names else sorted(names)
        are_all = names == {one for one, of in self._topic_of.items() if of == topic}
        if are_all and operation != "RETRY" and form.random() < 0.5:
            asked = []  # all of the topic's; a retry has to name one
        message = ControlCommand(request_id=command.id, topic=topic, subscriptions=asked, sum_up=command.sums_up)
        entries = [_entry(entry, index) for entry, index in named]
        if schedule_key:
            entries = [SkipEntry(schedule_key=schedule_key)]
        self._name_partition(message, entries)
        match operation:
            case "CANCEL":
                cancels = [
                    CancelDelayedMessage(schedule_key=schedule_key)
                    if schedule_key
                    else CancelDelayedMessage(ledger_id=one.ledger_id, entry_id=one.entry_id, deliver_at=value)
                    for one in entries
                ]
                if len(cancels) > 1 or form.random() < 0.3:
                    message.cancels.messages.extend(cancels)
                else:
                    message.cancel.CopyFrom(cancels[0])
            case "SKIP":
                for one, (entry, index) in zip(entries, named, strict=False):
                    account = self._account(entry, index, max(names))
                    if account is not None and form.random() < 0.3:
                        one.deliver_at = account.due  # so that it is found sooner
                message.skip.entries.extend(entries)
            case "RESCHEDULE":
                message.reschedule.entries.extend(entries)
                message.reschedule.deliver_at = value
            case "POSTPONE":
                message.postpone.entries.extend(entries)
                message.postpone.by_millis = value
            case "RESTORE":
                message.restore.entries.extend(entries)
            case "RETRY":
                message.retry.entry.CopyFrom(entries[0])
                message.retry.after_millis = max(1, value - self._now())
            case "SKIP_NEXT":
                message.skip_next.entries.extend(entries)
            case "PAUSE_SCHEDULE":
                message.pause_schedule.entries.extend(entries)
            case "RESUME_SCHEDULE":
                message.resume_schedule.entries.extend(entries)
            case "PAUSE":
                message.pause.SetInParent()
            case "RESUME":
                message.resume.SetInParent()
        self.last_due = max(self.last_due, self._now() + 60_000)
        self._accounts.add_command(command)
        if operation not in ("PAUSE", "RESUME"):
            self._sent.append((command, message))
        what = schedule_key or " ".join(f"{entry}:{index}" for entry, index in named)
        self._trace(f"asks {command.id} {operation} {what} of {','.join(sorted(names))}, {value}")
        self._publish(message)

    def _publish(self, message: ControlCommand) -> None:
        entry = single_entry(OutgoingMessage(1, message.SerializeToString()), b"operator", self._now())
        data, topic = entry.data, self._settings.control.topic
        following = self._cluster.topic(topic).next
        if random.Random(f"{self._name} sent to {following}").random() < self.share_elsewhere:
            data = as_replicated(data, ELSEWHERE, following)
        self._cluster.publish(topic, data)


def _entry(entry: str, index: int) -> SkipEntry:
    ledger, number = map(int, entry.split(":"))
    return SkipEntry(ledger_id=ledger, entry_id=number, batch_indexes=[] if index < 0 else [index])
