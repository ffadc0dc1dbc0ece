"""Finds circles of routes, in which a message would go round for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def find_circle(written: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Returns a circle of topics, each of which is written with messages of the one before it; None: there is none.

    Args:
        written: by source topic: the topics that its messages may go to.

    Returns:
        the topics; the last one is the first one again.
    """
    is_done: set[str] = set()
    for start in written:
        path = [start]
        # The topics that are still to be looked at, for each topic of the path.
        left = [list(written[start])]
        while path:
            if not left[-1]:
                is_done.add(path.pop())
                left.pop()
                continue
            topic = left[-1].pop(0)
            if topic in path:
                return [*path[path.index(topic) :], topic]
            if topic in written and topic not in is_done:
                path.append(topic)
                left.append(list(written[topic]))
    return None
