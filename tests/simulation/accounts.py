"""What commands, ends and schedule keys make of messages, by docs/control.md, messages.md and schedules.md alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.expected import Arrival, Expected, entry_of

Pair = tuple[str, str]  # (position, subscription)

_CANCELS = ("CANCEL", "SKIP")
_REFUSED = ("INVALID", "NOT_ALLOWED")
_MOVES = ("RESCHEDULE", "POSTPONE")
# Nothing is dispatched so long before it is due: `release.max_lookahead_millis`, a tick, and a time slot.
DISPATCHED_MILLIS = 4_000 + 1_500


class BrokenGuaranteeError(AssertionError):
    """Something is not as docs/guarantees.md says."""


def require(holds: bool, text: str) -> None:
    """Raises BrokenGuaranteeError where something does not hold."""
    if not holds:
        raise BrokenGuaranteeError(text)


@dataclass
class Account:
    """A message of a subscription.

    Attributes:
        due: when it is due by all answers, ms since the epoch; after a retry when that is.
        due_by_sender: when it is due by its sender, ms since the epoch.
        sent_at: when its sender sent it, ms since the epoch.
        ends_at: from then on it is not sent; 0: it has no end.
        earlier: the times of deliveries before, which came or are on their way.
        is_cancelled: by a command, or because another message of its key took its place.
        is_expired: an outcome says so.
        is_debounced: it may be due sooner, as an answer will say.
        came_at: ms since the epoch, by the clock of the machine that has sent it.
        attempts: which of its deliveries came; 0: the first, n: the n-th retry.
        n_left_out: so many deliveries may not come, because a retry was asked for before: a rebuild knows of that,
            or the destination took nothing.
        is_unsure: answers about it came after the backup that is the warehouse now. They are given again, about what
            has come meanwhile, and may be other ones. docs/operations.md, "Backup and restore".
        n_lost_retries: retries that were answered after the backup, and may come once more.
    """

    due: int
    due_by_sender: int
    sent_at: int
    ends_at: int = 0
    earlier: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    is_expired: bool = False
    is_moved: bool = False
    is_debounced: bool = False
    came_at: list[int] = field(default_factory=list)
    attempts: set[int] = field(default_factory=set)
    n_left_out: int = 0
    is_unsure: bool = False
    n_lost_retries: int = 0

    @property
    def is_gone(self) -> bool:
        return self.is_cancelled or self.is_expired

    @property
    def n_expected(self) -> int:
        return len(self.earlier) + (not self.is_gone)

    @property
    def times(self) -> list[int]:
        """When each delivery is due, ascending."""
        return sorted([*self.earlier, self.due])


@dataclass
class Command:
    """A command that a user has sent.

    Attributes:
        operation: in capitals, as outcomes have it.
        named: (entry, batch index) of what it names, -1: the whole entry; empty: it is of subscriptions.
        subscriptions: for which it is.
        value: the new time, or by how much it moves.
        sent_at: ms since the epoch.
        n_sent: so often it was sent, under one request id.
        schedule_key: it names the message that waits under this key of its topic.
        n_others: so many other commands, restores, were sent under its request id.
        sums_up: its outcomes are told by numbers.
        is_lost: it was sent to a broker that is lost, and the backup has not answered it.
    """

    id: str
    operation: str
    topic: str
    named: list[tuple[str, int]]
    subscriptions: frozenset[str]
    value: int
    sent_at: int
    n_sent: int = 1
    schedule_key: str = ""
    n_others: int = 0
    n_refused: int = 0  # of these
    sums_up: bool = False
    is_lost: bool = False
    answers: dict[tuple[str, int, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    n_told_again: int = 0
    answered_at: int = 0  # the last answer, by the clock of its tick
    waits_from: dict[str, int] = field(default_factory=dict)  # by subscription: the first answer WAITING, likewise

    def is_done_before(self, at: int) -> bool:
        """Whether a command by key had its last answers before a time, ms since the epoch."""
        return self.answered_at < at and all(
            self.is_answered("-1:-1", -1, name) for name in self.subscriptions if name != "*"
        )

    def is_answered(self, entry: str, index: int, name: str) -> bool:
        """Whether something that it names has a last answer for a subscription."""
        return any(
            name == of_name
            and results[-1] != "WAITING"
            # An answer without a position is for all.
            and (of_entry == "-1:-1" or (entry == of_entry and (index == i or -1 in (index, i))))
            for (of_entry, i, of_name), results in self.answers.items()
        )


class Accounts:
    """The accounts of all messages and commands.

    Args:
        cumulative: subscriptions whose type acknowledges cumulatively: nothing is skipped there.
        shaped: those with a rate or windows: a message may be due later than its account says.
    """

    def __init__(self, cumulative: frozenset[str] = frozenset(), shaped: frozenset[str] = frozenset()) -> None:
        self._cumulative, self._shaped = cumulative, shaped
        self.accounts: dict[Pair, Account] = {}
        self.commands: dict[str, Command] = {}
        self._by_entry: dict[str, list[str]] = defaultdict(list)  # positions of an entry
        self._naming: dict[str, list[Command]] = defaultdict(list)  # commands by entry, or by topic and schedule key
        self._recurring: set[str] = set()  # entries
        self._rejected: set[str] = set()  # likewise, with a message that is rejected
        self._key_of: dict[str, str] = {}  # by position: its topic and schedule key
        self._paused_at: dict[tuple[str, str], int] = {}  # by topic and subscription
        self._last_resume: dict[tuple[str, str], int] = {}  # when it was sent
        self._rows: list[dict[str, Any]] = []  # of `outcomes`
        self._recorded: Counter[tuple[Any, ...]] = Counter()
        self._answers: dict[tuple[Any, ...], Counter[tuple[Any, ...]]] = defaultdict(Counter)  # what rows say
        self._told: Counter[tuple[Any, ...]] = Counter()
        self.results: Counter[str] = Counter()
        self.n_rebuilds = 0
        self._is_elsewhere = False  # a backup was restored with another broker
        self.forgotten: set[str] = set()  # entries of which rows are deleted that nobody needed
        self.left_out: frozenset[str] = frozenset()  # subscriptions of which another account is kept
        # Whether the source topic has lost an entry before any table had it.
        self.may_be_lost: Callable[[str], bool] = lambda entry: False
        # Whether nothing can be published for a subscription now.
        self.takes_nothing: Callable[[str], bool] = lambda name: False
        self._told_again: Counter[tuple[Any, ...]] = Counter()  # after a rebuild
        self._told_last: tuple[int, Counter[tuple[Any, ...]]] = (
            0,
            Counter(),
        )  # of the last tick that told any, by its time
        self._may_be_told: Counter[tuple[Any, ...]] = Counter()  # once more
        self.ahead_millis = self._behind_millis = 0  # the most that any machine's clock was

    @property
    def skew_millis(self) -> int:
        return self.ahead_millis + self._behind_millis

    @property
    def dispatched_millis(self) -> int:
        """Nothing is dispatched so long before it is due, by the clock of the world."""
        return DISPATCHED_MILLIS + self.skew_millis

    def note_clock(self, ahead_millis: int) -> None:
        """A machine's clock is ahead by so much; negative: behind."""
        self.ahead_millis = max(self.ahead_millis, ahead_millis)
        self._behind_millis = max(self._behind_millis, -ahead_millis)

    def add_message(self, position: str, message: Expected, sent_at: int) -> None:
        """A message is in a source topic, and is not rejected."""
        self._by_entry[entry_of(position)].append(position)
        key = message.schedule_key
        if key is not None:
            self._key_of[position] = f"{message.topic} {key.name}"
        for name in sorted(message.subscriptions):
            is_debounced = key is not None and key.limit > 0
            account = Account(message.due, message.due, sent_at, message.ends_at, is_debounced=is_debounced)
            self.accounts[position, name] = account

    def add_rejected(self, position: str) -> None:
        """A message that is to be rejected is in a source topic."""
        self._rejected.add(entry_of(position))

    def add_recurring(self, position: str) -> None:
        """A message that recurs is in a source topic: here it has no account."""
        self._recurring.add(entry_of(position))

    def add_command(self, command: Command) -> None:
        """A command is on the control topic."""
        self.commands[command.id] = command
        names = [f"{command.topic} {command.schedule_key}"] if command.schedule_key else [e for e, _ in command.named]
        for name in dict.fromkeys(names):
            self._naming[name].append(command)
        if command.operation == "RESUME":
            for name in command.subscriptions:
                self._paused_at.pop((command.topic, name), None)
                self._last_resume[command.topic, name] = command.sent_at

    # What happens.

    def arrived(self, arrival: Arrival, now: int) -> None:
        """A message has come to a destination, at a time by the clock of the machine that has sent it."""
        position, name = arrival.position, arrival.subscription
        account = self.accounts[position, name]
        account.came_at.append(now)
        is_again = arrival.attempt in account.attempts
        account.attempts.add(arrival.attempt)
        if account.is_unsure:
            self._check_most(position, name, account)
            # Each command that names it may have changed its time: nobody knows in which order.
            naming = [*self._commands_of(position, name)]
            self._check_not_early(position, name, account.due_by_sender, naming, now)
            may_come = not account.is_cancelled or any(one.operation in ("RETRY", "RESTORE") for one in naming)
            may_come |= self._is_elsewhere  # where answers about what was published there may not hold
            require(may_come, f"{name} has got {position}, which is cancelled after a restore")
            return
        require(not is_again, f"{name} has got {position} twice as its attempt {arrival.attempt}")
        unanswered = [one for one in self._unanswered(position, name) if one.operation != "CANCEL"]
        retries = sum(one.operation == "RETRY" for one in unanswered)
        n = len(account.came_at)
        require(n <= len(account.times) + retries, f"{name} has got {position} twice")
        restores = sum(one.operation == "RESTORE" for one in unanswered)
        is_gone = account.is_gone
        if n > account.n_expected + retries:
            require(not is_gone or restores > 0, f"{name} has got {position}, which is cancelled or expired")
        due = account.times[min(n, len(account.times)) - 1]
        self._check_not_early(position, name, due, unanswered, now)
        paused_at = self._paused_at.get((arrival.topic, name))
        if paused_at is not None and not account.is_moved and not unanswered:
            is_late = account.due > paused_at + self.dispatched_millis
            require(not is_late, f"{name} has got {position}, due {account.due - paused_at} ms after its pause")

    def _check_not_early(self, position: str, name: str, due: int, commands: Iterable[Command], now: int) -> None:
        """A message that is due at a time came no sooner, now, unless by commands that may be applied already."""
        account = self.accounts[position, name]
        soonest = account.sent_at if account.is_debounced else due
        soonest = min([soonest, *(_soonest(one, due) for one in commands)])
        early = soonest - now - self.ahead_millis
        require(early <= 0, f"{name} has got {position} {early} ms early")

    def rebuilt(self) -> None:
        """The checkpoint was rebuilt: a message that had not come when its retry was asked for comes as that alone."""
        self.n_rebuilds += 1
        for account in self.accounts.values():
            account.n_left_out = len({*range(len(account.earlier))} - account.attempts)

    def _check_most(self, position: str, name: str, account: Account) -> None:
        """An unsure message comes once, and once for each retry; those that were answered may come once more."""
        naming = self._naming.get(entry_of(position), ())
        retries = sum(one.operation == "RETRY" and name in one.subscriptions for one in naming)
        n, most = len(account.came_at), 1 + retries + account.n_lost_retries
        require(n <= most, f"{name} has got {position} {n} times, and {most} at most after a restore")

    def restored(self, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A backup is the warehouse now, with these rows of `outcomes`; what is not among them is answered again.

        Returns:
            (answers that it lacks; answers that the earlier warehouse never had for good, in any order).
        """
        before = Counter(map(repr, self._rows))
        new = []
        for row in rows:
            if before[repr(row)]:
                before[repr(row)] -= 1
            else:
                new.append(row)
        lost: list[dict[str, Any]] = []
        kept: list[dict[str, Any]] = []
        for row in reversed(self._rows):  # of alike ones the last is lost
            (lost if before[repr(row)] else kept).append(row)
            before[repr(row)] -= before[repr(row)] > 0
        self._rows = kept[::-1]
        for row in lost:
            self._take_back(row)
        self._told &= self._recorded
        new = [row for row in new if not self._is_none_of_commands(row)]
        for row in new:
            self._become_unsure(row)
        return lost, new

    def forget(self, position: str, names: Collection[str]) -> None:
        """A message is lost with its broker for some subscriptions, and nothing is to become of it there."""
        for name in names:
            self.accounts.pop((position, name), None)
        if not self.accounts_of(position):
            of_entry = self._by_entry[entry_of(position)]
            of_entry[:] = [one for one in of_entry if one != position]

    def restored_elsewhere(
        self, recorded: Counter[Pair], attempts: Mapping[Pair, set[int]], published_there: set[str]
    ) -> None:
        """A backup is the warehouse now, with another broker.

        What had come, and the backup does not know of, comes again. Commands that it has not answered are not known.

        Args:
            recorded: the number of deliveries that the backup has.
            attempts: which ones.
            published_there: entries that were published where the backup is restored. Answers about them may not hold,
                and what they are about may come twice.
        """
        for pair, account in self.accounts.items():
            del account.came_at[recorded[pair] :]
            account.attempts = attempts.get(pair, set())
        self._is_elsewhere = True
        self.rebuilt()
        for command in self.commands.values():
            named = command.named or [("-1:-1", -1)]
            command.is_lost = not all(
                command.is_answered(entry, index, name) for entry, index in named for name in command.subscriptions
            )
            command.n_sent, command.n_refused = 1, command.n_others * len(command.subscriptions)
            is_unsure = command.is_lost or command.operation == "RETRY"
            for position in [p for entry, _ in command.named if is_unsure for p in self._by_entry[entry]]:
                for account in self.accounts_of(position):
                    account.is_unsure = account.is_moved = True
        for (position, _), account in self.accounts.items():
            if entry_of(position) in published_there and (account.ends_at or self.is_named(position)):
                account.is_unsure = account.is_moved = True
                account.n_lost_retries += 1

    def _take_back(self, row: dict[str, Any]) -> None:
        """An answer is lost with its table: what it was about is unsure, and the command is to be answered again."""
        self._recorded[self._outcome_key(row)] -= 1
        self._note_said(row, -1)
        name, index = row["subscription"], row["batch_index"]
        if name in self.left_out:
            return
        entry = f"{row['ledger_id']}:{row['entry_id']}"
        command = self.commands.get(row["request_id"])
        if command is not None and command.n_others and row["operation"] == "RESTORE":
            command.n_refused -= 1
        elif command is not None:
            key = ("-1:-1", -1, name) if command.schedule_key else (entry, index, name)
            command.answers[key].remove(row["result"])
            if not command.answers[key]:
                del command.answers[key]
        if row["operation"] in ("PAUSE", "RESUME"):
            self._paused_at.pop((row["topic"], name), None)
        for account in self._become_unsure(row):
            account.n_lost_retries += (row["operation"], row["result"]) == ("RETRY", "APPLIED")

    def _become_unsure(self, row: dict[str, Any]) -> list[Account]:
        """Notes that nobody knows in which order an answer was given; returns the accounts that it is about."""
        found = []
        for position in self._by_entry[f"{row['ledger_id']}:{row['entry_id']}"]:
            account = self.accounts.get((position, row["subscription"]))
            if account is not None and (row["batch_index"] < 0 or position.endswith(f":{row['batch_index']}")):
                account.is_unsure = account.is_moved = True
                account.is_cancelled = account.is_expired = False
                found.append(account)
        return found

    def _is_none_of_commands(self, row: dict[str, Any]) -> bool:
        """Whether a rebuild has written a row, or it is of what was on its way to a subscription that was taken out."""
        is_given_up = row["subscription"] in self.left_out and row["request_id"].startswith("not-delivered-")
        return row["issued_by"] == "rebuild" or is_given_up

    def recorded(self, row: dict[str, Any]) -> None:
        """An outcome is in the table, and no loss of power takes it."""
        if self._is_none_of_commands(row):
            if row["issued_by"] == "rebuild" and row["subscription"] not in self.left_out:
                self._check_rebuilt(row)
            return
        self._rows.append(row)
        self._recorded[self._outcome_key(row)] += 1
        self._note_said(row, 1)
        self.results[f"{row['operation']} {row['result']}"] += 1
        is_left_out = row["operation"] == "SCHEDULE" or row["result"] == "SUPERSEDED"
        if not is_left_out and row["subscription"] not in self.left_out:
            self._apply(row)

    def _note_said(self, row: dict[str, Any], n: int) -> None:
        """Adds a row of `outcomes` to what may be told, alone and summed up; or takes it out, n -1."""
        answers = self._answers[self._outcome_key(row)]
        for is_summed in (False, True):
            answers[_said(row, is_summed)] += n

    def _check_rebuilt(self, row: dict[str, Any]) -> None:
        """A rebuild moves and restores messages again that come again: as an earlier answer has said."""
        position, name, due = row["position"], row["subscription"], row["deliver_at"]
        if entry_of(position) in self._recurring:
            return
        account = self.accounts[position, name]
        if account.is_unsure:
            return
        if row["operation"] == "RESTORE":
            is_gone = row["result"] == "APPLIED" and account.is_gone
            require(not is_gone, f"a rebuild has restored {position} of {name}, which is cancelled or expired")
            return
        is_right = row["result"] != "APPLIED" or due == account.due or account.due < due <= row["applied_at"]
        require(is_right, f"a rebuild has {position} of {name} due at {due}, and not at {account.due}")

    def told(self, row: dict[str, Any]) -> None:
        """An outcome is on the outcome topic: the table has it before."""
        key = self._outcome_key(row)
        if row["request_id"].startswith("rebuild-"):
            return
        is_of_command = row["request_id"] in self.commands
        n, said = row["n_named"] or 1, _said(row, is_summed=row["n_named"] > 0)
        if not row["request_id"].startswith("not-delivered-"):
            written = {one: m for one, m in self._answers[key].items() if m > 0}
            require(written.get(said, 0) >= n, f"told {n} times {said} of {key}, and `outcomes` has {written}")
        if row["is_repeat"] and is_of_command:
            self.commands[row["request_id"]].n_told_again += 1
        if row["is_repeat"] and self.n_rebuilds:  # which tells the last answers again: they may not have been told
            self._told_again[key] += n
        if row["is_repeat"] and (is_of_command or self.n_rebuilds):
            return
        if self._told[key] + n > self._recorded[key] and self._may_be_told[key] >= n:
            self._may_be_told[key] -= n
            return
        self._told[key] += n
        require(self._told[key] <= self._recorded[key], f"told, and not in `outcomes`: {key}")
        at, last = self._told_last
        if row["applied_at"] > at:
            self._told_last = row["applied_at"], Counter({key: n})
        elif row["applied_at"] == at:
            last[key] += n

    def producers_forgotten(self) -> None:
        """The broker has forgotten the job's producers: what it told last may be told once more."""
        self._may_be_told = self._told_last[1]

    def _outcome_key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        names = ("request_id", "subscription", "result", "operation")
        position = ("ledger_id", "entry_id", "batch_index")
        command = self.commands.get(row["request_id"])
        is_summed = row["request_id"] in ("expired", "superseded") or (command is not None and command.sums_up)
        return tuple(row[name] or 0 for name in (names if is_summed else (*names, *position)))

    def is_gone(self, entry: str) -> bool:
        """Whether outcomes say that nobody gets any message of an entry, of which none is rejected, or recurs."""
        found = [account for position in self.positions_of(entry) for account in self.accounts_of(position)]
        is_plain = bool(found) and entry not in self._rejected and entry not in self._recurring
        return is_plain and all(one.is_gone or (self._is_elsewhere and one.is_unsure) for one in found)

    def check_end(self) -> None:
        """Nothing waits any more: each message has come as often as it is to, each command is answered."""
        for (position, name), account in self.accounts.items():
            if account.is_unsure:
                self._check_most(position, name, account)
                may_be_gone = account.ends_at or position in self._key_of
                may_be_gone = may_be_gone or any(c.operation in _CANCELS for c in self._commands_of(position, name))
                require(bool(account.came_at or may_be_gone), f"{name} has not got {position} after a restore")
                continue
            n, expected = len(account.came_at), account.n_expected
            least = 0 if self.may_be_lost(entry_of(position)) else expected - account.n_left_out
            is_right = least <= n <= expected
            require(is_right, f"{name} has got {position} {n} times, and not {expected}")
            for came_at, due in zip(account.came_at, account.times, strict=False):
                early = due - came_at - self.ahead_millis
                require(early <= 0, f"{name} has got {position} {early} ms early")
        for command in [command for command in self.commands.values() if not command.is_lost]:
            for entry, index in command.named or [("-1:-1", -1)]:
                for name in sorted(command.subscriptions):
                    is_answered = command.is_answered(entry, index, name)
                    require(is_answered, f"{command.id} {command.operation} {entry} of {name} is not answered")
            is_right = command.n_refused >= command.n_others * len(command.subscriptions)
            require(is_right, f"not every other command under {command.id} is answered")
            is_refused = any(results[-1] == "NOT_ALLOWED" for results in command.answers.values())
            is_told = command.n_sent == 1 or command.n_told_again > 0 or is_refused
            require(is_told, f"{command.id} was sent {command.n_sent} times, and no repeat is answered")
        left = self._recorded - self._told - self._told_again
        if self.n_rebuilds:  # what is refused comes again where it was not acknowledged, and is answered anew
            told = self._told | self._told_again
            refused = {key for key in left if key[2] in _REFUSED or key[2:4] == ("ALREADY_APPLIED", "SCHEDULE")}
            left = Counter({key: n for key, n in left.items() if not (key in refused and told[key])})
        require(not left, f"{left.total()} outcomes were never told, as {next(iter(left), '')}")

    # How answers change accounts.

    def accounts_of(self, position: str) -> list[Account]:
        """The accounts of a message."""
        return [account for (one, _), account in self.accounts.items() if one == position]

    def commands_for(self, position: str) -> list[Command]:
        """The commands that name a message's entry."""
        return self._naming.get(entry_of(position), [])

    def operations_for(self, position: str) -> set[str]:
        """The operations of the commands that name a message's entry."""
        return {command.operation for command in self.commands_for(position)}

    def is_named(self, position: str, since: int = 0) -> bool:
        """Whether a command names a message, or its key, but for those by key that were done before a time.

        Args:
            since: ms since the epoch.
        """
        by_key = self._naming.get(self._key_of.get(position, ""), ())
        before = since - self.skew_millis
        return bool(self._naming.get(entry_of(position))) or any(not one.is_done_before(before) for one in by_key)

    def soonest(self, position: str, due: int) -> int:
        """When a message that is due at a time may come at the earliest, whatever any command has made of it."""
        naming = [*self.commands_for(position), *self._naming.get(self._key_of.get(position, ""), ())]
        debounced = [one.sent_at for one in self.accounts_of(position) if one.is_debounced]
        return min([due, *debounced, *(_soonest(one, due) for one in naming)])

    def is_named_only_by(self, position: str, command: Command) -> bool:
        """Whether no other command names a message, or its key."""
        naming = self._naming.get(entry_of(position), []) + self._naming.get(self._key_of.get(position, ""), [])
        return all(one is command for one in naming)

    def positions_of(self, entry: str) -> list[str]:
        """The messages of an entry that are neither rejected nor recur."""
        return self._by_entry.get(entry, [])

    def is_shaped(self, name: str) -> bool:
        """Whether a subscription has a rate or windows."""
        return name in self._shaped

    def is_unanswered(self, position: str, name: str) -> bool:
        """Whether a command names a message, and is not answered yet."""
        return any(True for _ in self._unanswered(position, name))

    def _commands_of(self, position: str, name: str) -> Iterator[Command]:
        """The commands that name a message, or its key, for a subscription."""
        entry, index = entry_of(position), int(position.rpartition(":")[2])
        for command in [*self._naming[entry], *self._naming.get(self._key_of.get(position, ""), ())]:
            is_named = command.schedule_key or any(entry == one and i in (-1, index) for one, i in command.named)
            if is_named and name in command.subscriptions:
                yield command

    def _unanswered(self, position: str, name: str) -> Iterator[Command]:
        entry, index = entry_of(position), int(position.rpartition(":")[2])
        return (one for one in self._commands_of(position, name) if not one.is_answered(entry, index, name))

    def _apply(self, row: dict[str, Any]) -> None:
        operation, result, name = row["operation"], row["result"], row["subscription"]
        entry, index = f"{row['ledger_id']}:{row['entry_id']}", row["batch_index"]
        command = self.commands.get(row["request_id"])
        if command is not None and command.n_others and operation == "RESTORE":
            require(result == "INVALID", f"another {command.id} {operation} {entry}:{index} of {name}: {result}")
            command.n_refused += 1
            return
        if command is not None:
            # By a key it names one message.
            answers = command.answers[
                "-1:-1" if command.schedule_key else entry, -1 if command.schedule_key else index, name
            ]
            is_named_again = command.named.count((entry, index)) > 1
            # What is refused whole is answered anew, and its request id is not remembered.
            is_named_again |= result == "NOT_ALLOWED" and len(answers) < command.n_sent + self.n_rebuilds
            is_last = bool(answers) and answers[-1] != "WAITING" and not is_named_again
            require(not is_last, f"{command.id} {operation} {entry}:{index} of {name}: {answers}, and then {result}")
            answers.append(result)
            command.answered_at = max(command.answered_at, row["applied_at"])
            if result == "WAITING":
                command.waits_from.setdefault(name, row["applied_at"])
            is_refused = operation == "SKIP" and name in self._cumulative
            require((result == "NOT_ALLOWED") == is_refused, f"{command.id} {operation} of {name}: {result}")
        elif result != "EXPIRED":
            raise BrokenGuaranteeError(f"nobody has sent the command of {row}")
        if name == "*":  # there are none that come later
            return
        if row["ledger_id"] < 0:
            if command is not None and (operation, result) == ("PAUSE", "APPLIED"):
                self._pause(command, name, row["applied_at"])
            return
        if entry in self._recurring:
            return
        of_entry = [p for p in self._by_entry[entry] if (p, name) in self.accounts]
        positions = [p for p in of_entry if index < 0 or p.endswith(f":{index}")]
        if not positions and entry in self._rejected and result != "APPLIED":
            return
        if not positions and result in ("APPLIED", "ALREADY_APPLIED"):
            raise BrokenGuaranteeError(f"{result} for {entry}:{index}, which nobody has sent")
        if command is not None and command.schedule_key:
            is_of_key = all(self._key_of.get(p) == f"{command.topic} {command.schedule_key}" for p in positions)
            require(is_of_key, f"{command.id} is for {command.schedule_key}, and not for {entry}:{index}")
        if len(positions) > 1 and result == "APPLIED":  # the others of the entry are done already
            waiting = [p for p in positions if not self.accounts[p, name].is_gone]
            positions = waiting if operation in _CANCELS and waiting else positions
        for position in positions:
            account = self.accounts[position, name]
            what = f"{command.id if command else ''} {operation} {position} of {name}: {result}"
            self._change(account, row, command, what)

    def _pause(self, command: Command, name: str, at: int) -> None:
        if self._last_resume.get((command.topic, name), -1) < command.sent_at:
            self._paused_at[command.topic, name] = at

    def _change(self, account: Account, row: dict[str, Any], command: Command | None, what: str) -> None:
        operation, result, at = row["operation"], row["result"], row["applied_at"]
        if account.is_unsure:
            if result == "APPLIED" and operation in (*_CANCELS, "RESTORE"):
                account.is_cancelled = operation != "RESTORE"
            account.is_expired = result == "EXPIRED" or (account.is_expired and operation != "RESTORE")
            return
        is_gone = account.is_gone
        n_before = len(account.earlier)
        # Once all is dispatched that is due so early nobody needs to know any more that it was cancelled.
        is_past = account.due < at + self.dispatched_millis
        match result:
            case "EXPIRED":
                require(
                    0 < account.ends_at <= at + self.skew_millis,
                    f"{what} before its end, by {account.ends_at - at} ms",
                )
                require(not account.is_cancelled and len(account.came_at) <= n_before, what)
                account.is_expired = True
            case "APPLIED" if operation in _CANCELS:
                require(not is_gone and len(account.came_at) <= n_before, f"{what}, and it has come, or was cancelled")
                account.is_cancelled = True
            case "APPLIED" if operation in _MOVES:
                require(not is_gone, f"{what}, though it was cancelled")
                self._move(account, row, command, what)
            case "APPLIED" if operation == "RESTORE":
                require(is_gone, f"{what}, though it was not cancelled")
                account.is_cancelled = account.is_expired = False
            case "APPLIED" if operation == "RETRY":
                require(not account.is_cancelled or is_past, f"{what}, though it was cancelled")
                if not is_gone:
                    # What is on its way to a destination that takes nothing is taken back: the retry alone comes.
                    has_come = len(account.earlier) in account.attempts
                    account.n_left_out += not has_come and self.takes_nothing(row["subscription"])
                    account.earlier.append(account.due)
                account.due, account.is_moved = row["deliver_at"], True
                account.is_cancelled = account.is_expired = False
            case "ALREADY_APPLIED" if operation in _CANCELS:
                require(is_gone, f"{what}, though it was not cancelled")
            case "ALREADY_APPLIED" if operation == "RESTORE":
                require(not account.is_cancelled or is_past, f"{what}, though it was cancelled")
            case "TOO_LATE" if operation != "RESTORE":
                require(not account.is_cancelled or is_past, f"{what}, though it was cancelled")
                # Where it is not known the time that the command names is past.
                is_lost = self.may_be_lost(entry_of(row["position"]))
                named = command.value if command is not None and is_lost else account.due
                early = min(account.due, named) - at - self.dispatched_millis
                require(early <= 0, f"{what}, {early} ms before anything is dispatched")
            case "INVALID" if operation in (*_MOVES, "RETRY"):
                require(is_gone, f"{what}, though it was not cancelled")
            case "NOT_FOUND" if operation != "RETRY" and command is not None and not command.schedule_key:
                entry = entry_of(row["position"])
                is_known = account.sent_at <= command.sent_at and entry not in self.forgotten
                is_known = is_known and not self.may_be_lost(entry)
                require(not is_known, f"{what}, and it was there")

    def _move(self, account: Account, row: dict[str, Any], command: Command | None, what: str) -> None:
        assert command is not None
        asked = command.value if row["operation"] == "RESCHEDULE" else account.due + command.value
        due = row["deliver_at"]
        # The time is never before now, by the clock of the tick.
        at, skew = row["applied_at"], self.skew_millis
        is_right = due == asked if asked > at + skew else asked <= due <= at + skew
        is_vague = account.is_moved or (row["subscription"] in self._shaped and row["operation"] == "POSTPONE")
        require(is_right or is_vague, f"{what} to {due}, and not to {asked}")
        account.due, account.is_moved = due, True


def _said(row: Mapping[str, Any], is_summed: bool) -> tuple[Any, ...]:
    """Returns what an outcome says beside what it is about: a row of the table, and what is told of it, alike."""
    texts = tuple(row[name] or "" for name in ("topic", "reason"))
    if is_summed:
        return texts
    due = row["deliver_at"] if row["operation"] == "SCHEDULE" else 0
    place = tuple(row[name] for name in ("ledger_id", "entry_id", "batch_index"))
    return *texts, *place, row["superseded_by"] or "", row["schedule_key"] or "", row["occurrence"] or 0, due or 0


def _soonest(command: Command, due: int) -> int:
    """Returns when a message may come at the earliest by a command that may be applied already."""
    if command.operation == "RESCHEDULE":
        return max(command.value, command.sent_at)
    return command.sent_at if command.operation in ("POSTPONE", "RETRY", "RESTORE") else due
