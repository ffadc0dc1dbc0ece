"""Adds delayed jobs of BullMQ's, as an application that has it does, to the queue `video` of the Redis at the URL.

Prints for each by its id when it was added, in ms since the epoch, and its delay, as JSON. A worker has failed on the
last, so that it waits for another try; and there is a job scheduler.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from bullmq import Queue, Worker

HOUR_MILLIS = 3_600_000


async def main(url: str) -> None:
    queue = Queue("video", {"connection": url})
    delayed = await queue.add("encode", {"name": "Jürgen"}, {"delay": HOUR_MILLIS})
    first = await queue.add("encode", {"n": 2}, {"delay": HOUR_MILLIS, "jobId": "mine", "priority": 3})
    removed = await queue.add("encode", {"n": 3}, {"delay": HOUR_MILLIS})
    await removed.remove()
    await queue.upsertJobScheduler("yearly", {"pattern": "0 0 1 1 *"}, "report", {"n": 4})
    tried = await queue.add("encode", {"n": 5}, {"attempts": 3, "backoff": {"type": "fixed", "delay": HOUR_MILLIS}})
    has_failed = asyncio.Event()

    async def fail(*_: Any) -> None:
        raise RuntimeError("no codec")

    worker = Worker("video", fail, {"connection": url})
    worker.on("failed", lambda *_: has_failed.set())
    await has_failed.wait()
    await worker.close()
    await queue.close()
    print(json.dumps({job.id: [job.timestamp, HOUR_MILLIS] for job in (delayed, first, tried)}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
