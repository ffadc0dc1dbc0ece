-- subscriptions --
SELECT * FROM (VALUES :routes) AS s (topic, subscription)

-- destinations --
-- Where the messages of each subscription go, or went last, also of those that the settings no longer have.
SELECT * FROM (VALUES :known_destinations) AS s (topic, subscription, destination)

-- last_commands --
:all_last_commands

-- named_entries --
-- The number of messages in each entry that a command named as a whole.
SELECT ledger_id, entry_id, max(batch_size) AS batch_size FROM (
    SELECT ledger_id, entry_id, batch_size FROM entries
    UNION ALL SELECT ledger_id, entry_id, batch_size FROM delayed_index WHERE operation = 'DELAY'
) AS e
LEFT SEMI JOIN (SELECT * FROM last_commands WHERE batch_index = -1) AS c
    ON c.ledger_id = e.ledger_id AND c.entry_id = e.entry_id
GROUP BY ledger_id, entry_id

-- cancellations --
-- Cancels that were not restored: a row for each message, or with batch_index -1 for a whole entry, with the number
-- of its messages that are still cancelled.
SELECT * FROM (
    SELECT o.topic, o.subscription, o.partition, o.ledger_id, o.entry_id, o.batch_index, o.operation, o.request_id,
           o.issued_by, o.issued_at, o.applied_at, o.sequence, o.schedule_key, o.superseded_by,
           max(CASE WHEN o.batch_index >= 0 THEN 1 ELSE coalesce(e.batch_size, 1) END) - count(r.restored) AS messages
    FROM outcomes AS o
    LEFT JOIN last_commands AS r ON r.subscription = o.subscription AND r.ledger_id = o.ledger_id
        AND r.entry_id = o.entry_id
        AND (r.batch_index = o.batch_index OR o.batch_index = -1) AND r.restored > o.sequence
    LEFT JOIN named_entries AS e ON e.ledger_id = o.ledger_id AND e.entry_id = o.entry_id
    WHERE :is_cancel
    GROUP BY o.topic, o.subscription, o.partition, o.ledger_id, o.entry_id, o.batch_index, o.operation, o.request_id,
             o.issued_by, o.issued_at, o.applied_at, o.sequence, o.schedule_key, o.superseded_by
) AS c
WHERE messages > 0

-- last_occurrences --
:all_last_occurrences

-- unfinished --
-- Rows of messages that were not delivered, cancelled, or moved to a later row. A message that was due while its
-- subscription was not in the settings does not wait any more (`is_missed`).
SELECT i.topic, s.subscription, i.partition, i.ledger_id, i.entry_id, i.batch_index, i.deliver_at,
       i.deliver_at = :held AS is_held, i.deliver_at >= :paused_at AS is_paused,
       i.key, i.properties, i.publish_time, i.producer_name, i.payload, i.schedule_key, i.attempt, i.shaped_from,
       i.occurrence, i.sequence,
       :missed AS is_missed
FROM delayed_index AS i
JOIN subscriptions AS s ON s.topic = i.topic AND s.subscription = coalesce(i.subscription, s.subscription)
LEFT ANTI JOIN deliveries AS d ON d.subscription = s.subscription AND d.ledger_id = i.ledger_id
    AND d.entry_id = i.entry_id AND d.batch_index = i.batch_index
    AND coalesce(d.attempt, 0) = coalesce(i.attempt, 0) AND i.occurrence IS NULL
LEFT ANTI JOIN last_occurrences AS n ON n.subscription = s.subscription AND n.ledger_id = i.ledger_id
    AND n.entry_id = i.entry_id AND n.batch_index = i.batch_index AND n.occurrence >= i.occurrence
:join_commands
WHERE i.operation = 'DELAY' AND NOT (:is_cancelled) AND NOT (:is_moved_on)

-- pending --
-- Pending messages: a row for each message and subscription. The time of one that is parked (`is_held`) or of a
-- paused schedule (`is_paused`) means nothing. A recurring message has a row for its next `occurrence`.
SELECT topic, subscription, partition, ledger_id, entry_id, batch_index, deliver_at, is_held, is_paused, key,
       properties, publish_time, producer_name, payload, schedule_key, attempt, shaped_from, occurrence
FROM unfinished WHERE NOT is_missed

-- schedules --
-- Recurring messages: a row for each subscription. An occurrence that is due within seconds has no row in the index.
-- So a schedule without a next row has ended only if the job has run on for some time after the last occurrence. A
-- missed occurrence has ended the schedule.
SELECT i.topic, s.subscription, i.partition, i.ledger_id, i.entry_id, i.batch_index,
       CASE WHEN :is_cancelled THEN 'takenBack' WHEN p.is_missed THEN 'ended'
            WHEN p.is_paused THEN 'paused' WHEN p.is_held THEN 'held'
            WHEN p.occurrence IS NOT NULL THEN 'waiting'
            WHEN d.occurrence >= TRY_CAST(i.properties['repeatTimes'] AS BIGINT) THEN 'ended'
            WHEN d.done_at < :last_batch - :next_is_there_millis THEN 'ended' ELSE 'waiting' END AS state,
       i.properties['repeat'] AS repeat, coalesce(i.properties['timeZone'], 'UTC') AS time_zone,
       TRY_CAST(i.properties['repeatUntil'] AS BIGINT) AS until_time,
       TRY_CAST(i.properties['repeatTimes'] AS BIGINT) AS times,
       coalesce(i.properties['misfire'], 'once') AS misfire, i.deliver_at AS first_at,
       coalesce(d.delivered, 0) AS delivered, d.occurrence AS last_occurrence, d.deliver_at AS last_at,
       CASE WHEN NOT p.is_missed THEN p.occurrence END AS next_occurrence,
       CASE WHEN NOT p.is_missed AND NOT (p.is_held OR p.is_paused) THEN p.deliver_at END AS next_at,
       i.key, i.schedule_key, i.publish_time, i.producer_name, i.payload
FROM delayed_index AS i
JOIN subscriptions AS s ON s.topic = i.topic
LEFT JOIN (
    SELECT *, row_number() OVER (
        PARTITION BY subscription, ledger_id, entry_id, batch_index ORDER BY occurrence
    ) AS place FROM unfinished WHERE occurrence IS NOT NULL AND (sequence IS NOT NULL OR NOT is_missed)
) AS p ON p.place = 1 AND p.subscription = s.subscription
    AND p.ledger_id = i.ledger_id AND p.entry_id = i.entry_id AND p.batch_index = i.batch_index
LEFT JOIN last_occurrences AS d ON d.subscription = s.subscription
    AND d.ledger_id = i.ledger_id AND d.entry_id = i.entry_id AND d.batch_index = i.batch_index
:join_commands
WHERE i.operation = 'DELAY' AND i.occurrence IS NOT NULL AND i.sequence IS NULL
    AND (p.occurrence IS NOT NULL OR d.occurrence IS NOT NULL OR NOT :missed)

-- attempts --
-- A row for each retry of a message and subscription, and with attempt 0 for each dead letter that was re-driven.
-- `sent_at` is null if it was not delivered yet.
SELECT o.topic, o.subscription, o.partition, o.ledger_id, o.entry_id, o.batch_index, o.position, o.retry_of, o.attempt,
       o.reason, o.request_id, o.issued_by, o.issued_at, o.applied_at, o.deliver_at, d.sent_at, d.destination,
       :is_dead_letter AS is_dead_letter
FROM (
    SELECT topic, subscription, partition, ledger_id, entry_id, batch_index, position, coalesce(attempt, 0) AS attempt,
           max(retry_of) AS retry_of, max(reason) AS reason, max(request_id) AS request_id,
           max(issued_by) AS issued_by, min(issued_at) AS issued_at, min(applied_at) AS applied_at,
           max(deliver_at) AS deliver_at
    FROM outcomes WHERE operation IN ('RETRY', 'SENT_BACK', 'REDRIVE') AND result = 'APPLIED'
    GROUP BY topic, subscription, partition, ledger_id, entry_id, batch_index, position, coalesce(attempt, 0)
) AS o
LEFT JOIN deliveries AS d ON d.topic = o.topic AND d.subscription = o.subscription AND d.ledger_id = o.ledger_id
    AND d.entry_id = o.entry_id AND d.batch_index = o.batch_index AND coalesce(d.attempt, 0) = o.attempt
LEFT JOIN destinations AS t ON t.topic = o.topic AND t.subscription = o.subscription

-- schedule --
-- The number of messages that go out in each minute.
SELECT topic, subscription, date_trunc('minute', to_timestamp_millis(deliver_at)) AS minute, count(*) AS messages
FROM pending WHERE NOT (is_held OR is_paused) GROUP BY topic, subscription, minute ORDER BY minute, topic, subscription

-- shaped --
-- The queues of subscriptions with a rate or windows: the number of messages put off, and when the last one goes.
SELECT topic, subscription, count(*) AS messages, min(deliver_at) AS next_at, max(deliver_at) AS done_at,
       max(deliver_at - shaped_from) AS most_millis
FROM pending WHERE shaped_from IS NOT NULL AND NOT (is_held OR is_paused)
GROUP BY topic, subscription ORDER BY topic, subscription

-- lateness --
-- The lateness of deliveries by minute, in ms; those on short notice have rows of their own.
SELECT topic, subscription, date_trunc('minute', to_timestamp_millis(sent_at)) AS minute, short_notice,
       count(*) AS messages, approx_percentile_cont(sent_at - deliver_at, 0.5) AS p50_millis,
       approx_percentile_cont(sent_at - deliver_at, 0.99) AS p99_millis, max(sent_at - deliver_at) AS max_millis
FROM deliveries GROUP BY topic, subscription, minute, short_notice ORDER BY minute, topic, subscription

-- cancelled --
-- The number of cancelled messages: for each message that commands named, and for each whole entry without these.
SELECT c.topic, c.subscription, c.ledger_id, c.entry_id,
       CASE WHEN NOT (:is_cancelled) THEN 0 WHEN c.batch_index >= 0 THEN 1
            ELSE coalesce(e.batch_size, 1) - coalesce(n.messages, 0) END AS messages
FROM last_commands AS c
:join_named_commands
LEFT JOIN named_entries AS e ON e.ledger_id = c.ledger_id AND e.entry_id = c.entry_id
LEFT JOIN (
    SELECT subscription, ledger_id, entry_id, count(*) AS messages FROM last_commands WHERE batch_index >= 0
    GROUP BY subscription, ledger_id, entry_id
) AS n ON n.subscription = c.subscription AND n.ledger_id = c.ledger_id AND n.entry_id = c.entry_id

-- funnel --
-- The messages of each topic and subscription in numbers; entries that were not seen are not among those ingested.
SELECT s.topic, s.subscription, coalesce(e.taken_in, 0) AS taken_in, coalesce(d.delivered, 0) AS delivered,
       coalesce(c.messages, 0) AS taken_back, coalesce(p.pending, 0) AS pending, coalesce(r.rejected, 0) AS rejected,
       coalesce(r.not_seen, 0) AS not_seen
FROM subscriptions AS s
LEFT JOIN (SELECT topic, sum(batch_size) AS taken_in FROM entries GROUP BY topic) AS e ON e.topic = s.topic
LEFT JOIN (
    SELECT d.topic, d.subscription, count(*) AS delivered FROM deliveries AS d
    LEFT JOIN (
        SELECT subscription, ledger_id, entry_id, batch_index, max(attempt) AS attempt FROM attempts
        WHERE attempt > 0 GROUP BY subscription, ledger_id, entry_id, batch_index
    ) AS a ON a.subscription = d.subscription AND a.ledger_id = d.ledger_id AND a.entry_id = d.entry_id
        AND a.batch_index = d.batch_index
    WHERE a.attempt IS NULL OR d.attempt = a.attempt
    GROUP BY d.topic, d.subscription
) AS d ON d.topic = s.topic AND d.subscription = s.subscription
LEFT JOIN (
    SELECT topic, subscription, sum(messages) AS messages FROM cancelled GROUP BY topic, subscription
) AS c ON c.topic = s.topic AND c.subscription = s.subscription
LEFT JOIN (SELECT topic, subscription, count(*) AS pending FROM pending GROUP BY topic, subscription) AS p
    ON p.topic = s.topic AND p.subscription = s.subscription
LEFT JOIN (
    SELECT topic, count(*) FILTER (WHERE NOT is_not_seen) AS rejected, count(*) FILTER (WHERE is_not_seen) AS not_seen
    FROM (SELECT topic, coalesce(reason, '') LIKE :not_seen AS is_not_seen FROM rejects
          WHERE coalesce(reason, '') NOT LIKE :not_delivered) AS r GROUP BY topic
) AS r ON r.topic = s.topic
ORDER BY s.topic, s.subscription
