-- key --
-- `message` counts an entry's messages from 0, whether its batch_index is -1 (the entry is one message) or not.
topic, partition, ledger_id, entry_id, message

-- message_number --
CAST(greatest(batch_index, 0) AS BIGINT) AS message

-- is_seen --
-- Two kinds of rows in `rejects` are not of rejected messages: entries not seen were never ingested, ...
coalesce(reason, '') NOT LIKE :reason_not_seen

-- is_rejected --
-- ... and messages that a destination did not take count as cancelled there, and may have gone to others.
:is_seen AND coalesce(reason, '') NOT LIKE :reason_not_delivered

-- subscriptions --
-- The subscriptions that should get a topic's messages, also those of missing routes. A subscription that was added to
-- the settings since the job was started is not there yet (`is_there`): it should have got nothing.
SELECT * FROM (VALUES :routes) AS routes (topic, subscription, is_there)

-- messages --
-- A row for each message in any table, with the tables that have it. If only `entries` has an entry, no more than the
-- number of its messages is known.
SELECT :key, coalesce(min(batch_index), CASE WHEN max(batch_size) > 1 THEN message ELSE -1 END) AS batch_index,
       max(deliver_at) AS deliver_at,
       coalesce(min(deliver_at) FILTER (WHERE in_table = 'delayed_index' AND NOT is_moved), min(deliver_at))
           AS first_due,
       bool_or(in_table = 'entries') AS is_durable,
       bool_or(in_table = 'delayed_index') AS is_sealed,
       bool_or(in_table = 'rejects') AS is_rejected
FROM (
    SELECT 'entries' AS in_table, topic, partition, ledger_id, entry_id,
           :numbers AS message,
           CAST(NULL AS INT) AS batch_index, batch_size, CAST(NULL AS BIGINT) AS deliver_at, false AS is_moved
    FROM entries
    UNION ALL
    SELECT 'delayed_index', topic, partition, ledger_id, entry_id, :message_number, batch_index, NULL, deliver_at,
           subscription IS NOT NULL
    FROM delayed_index WHERE operation = 'DELAY'
    UNION ALL
    SELECT 'deliveries', topic, partition, ledger_id, entry_id, :message_number, batch_index, NULL, deliver_at, false
    FROM deliveries
    UNION ALL
    SELECT 'rejects', topic, partition, ledger_id, entry_id, :message_number, batch_index, NULL, NULL, false
    FROM rejects WHERE :is_rejected
) AS seen
GROUP BY :key

-- fates --
-- For each message and subscription, its state and when it is due. The state of a retried message is that of its last
-- retry. If that retry was answered in the last batch, the delayed index may not have it yet (is_last). Only `outcomes`
-- has messages that were superseded in the batch that brought them, for all subscriptions. A recurring message of which
-- no occurrence waits is over (is_over). Only `outcomes` has one whose only occurrence was skipped in that batch.
WITH retried AS (
    SELECT ledger_id, entry_id, message, subscription, max(attempt) AS attempt, max(deliver_at) AS deliver_at,
           max(batch_id) = (SELECT max(batch_id) FROM outcomes) AS is_last
    FROM (SELECT *, :message_number FROM outcomes WHERE :is_restore AND attempt IS NOT NULL) AS o
    GROUP BY ledger_id, entry_id, message, subscription
),
delivered AS (
    SELECT :key, subscription, attempt, count(*) AS times,
           max(CASE WHEN occurrence IS NOT NULL THEN batch_id END) AS recurring_until
    FROM (SELECT *, :message_number FROM deliveries) AS d GROUP BY :key, subscription, attempt
),
occurrences AS (:last_occurrences),
commands AS (:last_commands),
expired AS (
    SELECT DISTINCT ledger_id, entry_id, :message_number, subscription FROM outcomes WHERE result = 'EXPIRED'
),
superseded AS (SELECT DISTINCT ledger_id, entry_id, :message_number FROM outcomes WHERE result = 'SUPERSEDED'),
due AS (
    SELECT i.topic, i.partition, i.ledger_id, i.entry_id, i.message, s.subscription, max(i.deliver_at) AS deliver_at,
           min(CASE WHEN i.occurrence > coalesce(n.occurrence, 0) AND NOT :own_missed THEN i.deliver_at END)
               AS next_due,
           bool_and(:own_missed) FILTER (WHERE i.subscription IS NOT NULL) AS is_missed
    FROM (SELECT *, :message_number FROM delayed_index WHERE operation = 'DELAY') AS i
    JOIN subscriptions AS s ON s.topic = i.topic AND s.subscription = coalesce(i.subscription, s.subscription)
    LEFT JOIN occurrences AS n ON n.subscription = s.subscription AND n.ledger_id = i.ledger_id
        AND n.entry_id = i.entry_id AND n.batch_index = i.batch_index
    :join_commands_of_row
    WHERE NOT (:is_moved_on)
    GROUP BY i.topic, i.partition, i.ledger_id, i.entry_id, i.message, s.subscription
)
SELECT m.topic, m.partition, m.ledger_id, m.entry_id, m.message, m.batch_index, m.is_durable, m.is_sealed,
       m.is_rejected, s.subscription, coalesce(d.times, 0) AS times,
       coalesce(greatest(t.deliver_at, r.deliver_at), t.deliver_at, r.deliver_at, m.deliver_at) AS deliver_at,
       :is_cancelled AS is_cancelled, u.message IS NOT NULL AS is_superseded, x.message IS NOT NULL AS is_expired,
       t.next_due, d.recurring_until,
       o.occurrence IS NOT NULL AND t.next_due IS NULL AS is_over,
       :last_cancelled >> :sequence_bits AS cancelled_in, coalesce(r.is_last, false) AS is_retried_last
FROM messages AS m
JOIN subscriptions AS s ON s.topic = m.topic
LEFT JOIN retried AS r ON r.ledger_id = m.ledger_id AND r.entry_id = m.entry_id AND r.message = m.message
    AND r.subscription = s.subscription
LEFT JOIN delivered AS d ON d.topic = m.topic AND d.partition = m.partition AND d.ledger_id = m.ledger_id
    AND d.entry_id = m.entry_id AND d.message = m.message AND d.subscription = s.subscription
    AND (r.attempt IS NULL OR d.attempt = r.attempt)
LEFT JOIN due AS t ON t.topic = m.topic AND t.partition = m.partition AND t.ledger_id = m.ledger_id
    AND t.entry_id = m.entry_id AND t.message = m.message AND t.subscription = s.subscription
LEFT JOIN occurrences AS o ON o.ledger_id = m.ledger_id AND o.entry_id = m.entry_id
    AND greatest(o.batch_index, 0) = m.message AND o.subscription = s.subscription
LEFT JOIN expired AS x ON x.ledger_id = m.ledger_id AND x.entry_id = m.entry_id AND x.message = m.message
    AND x.subscription = s.subscription
LEFT JOIN superseded AS u ON u.ledger_id = m.ledger_id AND u.entry_id = m.entry_id AND u.message = m.message
:join_commands_of_message
WHERE d.times > 0 OR (s.is_there AND NOT coalesce(t.is_missed, :missed))

-- lost --
-- A message of a durable entry is nowhere: neither waiting, delivered, cancelled nor rejected.
SELECT topic, subscription, :position AS position FROM fates
WHERE is_durable AND NOT is_sealed AND NOT is_rejected AND NOT is_cancelled AND NOT is_superseded AND times = 0
    AND NOT is_retried_last AND NOT is_over

-- doubled --
-- A message was delivered more than once to a subscription, also to one that is no longer in the settings. Each retry
-- and each occurrence is a delivery of its own.
SELECT DISTINCT topic, subscription, position FROM (
    SELECT topic, subscription, position FROM deliveries
    GROUP BY topic, subscription, :delivery_key HAVING count(*) > 1
) AS d

-- early --
-- A message was sent before it was due, by the sender's clock.
SELECT topic, subscription, position FROM deliveries WHERE sent_at < deliver_at

-- delivered_although_cancelled --
-- A message was delivered although a command had cancelled it. Occurrences of a recurring message that were dispatched
-- before the command's batch are right.
SELECT topic, subscription, :position AS position FROM fates
WHERE is_cancelled AND times > 0 AND (recurring_until IS NULL OR recurring_until >= cancelled_in)

-- overdue --
-- A message waits although its time is long past.
SELECT topic, subscription, :position AS position FROM fates
WHERE is_sealed AND NOT is_cancelled AND topic NOT IN (:missing_topics)
    AND CASE WHEN times = 0 AND NOT is_over THEN deliver_at ELSE next_due END < :now - :overdue_millis

-- last_delivery --
-- The time against which messages are overdue, so that a stopped job has no overdue ones.
(SELECT max(sent_at) FROM deliveries)

-- without_route --
-- A message waits, and the settings have no route for its topic any more.
SELECT topic, subscription, :position AS position FROM fates
WHERE is_sealed AND NOT is_cancelled AND NOT is_over AND NOT is_rejected AND times = 0 AND topic IN (:missing_topics)

-- reject_delivered --
-- A message was rejected and delivered.
SELECT topic, subscription, :position AS position FROM fates WHERE is_rejected AND times > 0

-- not_seen --
-- The broker never handed the entry to the job; the finding is for all subscriptions.
SELECT topic, '' AS subscription, position FROM rejects WHERE NOT (:is_seen)

-- count --
SELECT count(*) AS n FROM (:finding) AS wrong

-- examples --
:finding ORDER BY topic, position, subscription LIMIT :n

-- counts --
-- The messages by topic, subscription and what became of them.
SELECT topic, subscription,
       count(*) FILTER (WHERE times > 0) AS delivered,
       sum(CASE WHEN recurring_until IS NULL THEN 0 ELSE times END) AS occurrences,
       count(*) FILTER (WHERE times = 0 AND (is_cancelled OR is_over AND NOT is_rejected)) AS taken_back,
       count(*) FILTER (WHERE times = 0 AND is_cancelled AND is_superseded) AS superseded,
       count(*) FILTER (WHERE times = 0 AND is_cancelled AND is_expired) AS expired,
       count(*) FILTER (WHERE times = 0 AND NOT is_cancelled AND is_rejected) AS rejected,
       count(*) FILTER (WHERE times = 0 AND NOT is_cancelled AND NOT is_over AND NOT is_rejected AND is_sealed) AS pending
FROM fates GROUP BY topic, subscription ORDER BY topic, subscription

-- totals --
-- How many messages have come in and are durable, and how many were rejected.
SELECT count(*) FILTER (WHERE is_durable) AS taken_in, count(*) FILTER (WHERE is_rejected) AS rejected FROM messages
