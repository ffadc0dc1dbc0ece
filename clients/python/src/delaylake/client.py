"""The client for programs that wait for each call."""

from __future__ import annotations

from collections.abc import Iterator

from delaylake import paging
from delaylake.connections import BlockingConnections
from delaylake.listing import MessageState, PendingMessage, Schedule
from delaylake.message_ids import MessageId, Outcome, Redriven
from delaylake.methods import Methods


class Client(
    BlockingConnections,
    Methods[MessageId, list[Outcome], Redriven, Iterator[PendingMessage], Iterator[Schedule]],
):
    """Schedules messages, and changes and lists those that wait. A context manager; thread-safe.

    ```python
    with Client("http://127.0.0.1:8081", broker="pulsar://localhost:6650") as lake:
        message = lake.schedule("orders", b"ship it", after=timedelta(minutes=10))
        lake.cancel("orders", message)
    ```

    A command returns an outcome for each subscription. If it fails for some subscriptions, it raises the error of the
    gravest outcome; for the others it is done. A command without a subscription is for all subscriptions that the topic
    has or gets later; over the control topic a subscription has to be named.

    Methods with `schedule_key=` take a message's id, or with that the message that waits under the key; if none waits,
    they raise NotFound.

    A call whose connection fails is repeated until its time is over. To repeat a command after that, or in another
    process, give it the `request_id` that you chose, or that of the error: a command is applied once under it.
    """

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, topic: str, message: MessageId | str) -> MessageState:
        """Returns a message that is not delivered to all its subscriptions yet; needs the admin API.

        Raises:
            NotFound: the message is delivered, came within the last seconds, or never existed.
            Invalid, Forbidden, Unavailable: see there.
        """
        message_id = MessageId.of(message)
        waiting = list(self._pages(paging.entry_listing(topic, message_id, "waiting")))
        cancelled = list(self._pages(paging.entry_listing(topic, message_id, "cancelled")))
        return paging.state_of(message_id, waiting, cancelled)
