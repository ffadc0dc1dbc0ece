-- changed --
topic, subscription, ledger_id, entry_id, batch_index, coalesce(sequence, 0) AS sequence

-- cancelled --
-- The cancelled messages in `delayed_index`; a command that still waits has cancelled none. Nor has one that waited, and
-- came too late: its row is of the tick in which it began to wait, which its sequence has above `sequence_bits`.
SELECT :changed, deliver_at FROM (SELECT * FROM delayed_index WHERE operation = 'CANCEL') AS c
LEFT ANTI JOIN (:waiting) AS w ON w.topic = c.topic AND w.subscription = c.subscription
    AND w.ledger_id = c.ledger_id AND w.entry_id = c.entry_id AND w.batch_index = c.batch_index
LEFT ANTI JOIN (:waited_too_long) AS l ON l.topic = c.topic AND l.subscription = c.subscription
    AND l.ledger_id = c.ledger_id AND l.entry_id = c.entry_id AND l.batch_index = c.batch_index
    AND l.sequence >> :sequence_bits = c.sequence >> :sequence_bits

-- waited_too_long --
-- The rows of `outcomes` with the result WAITING, and a later one TOO_LATE. Messages that a command for a whole entry did
-- cancel are in `answered`.
SELECT * FROM outcomes AS w LEFT SEMI JOIN (SELECT * FROM outcomes WHERE result = 'TOO_LATE') AS a
    ON a.request_id = w.request_id AND a.subscription = w.subscription AND a.ledger_id = w.ledger_id
    AND a.entry_id = w.entry_id AND (a.batch_index = w.batch_index OR w.batch_index <= 0)
WHERE w.result = 'WAITING'

-- answered --
-- The cancelled messages in `outcomes`. ALREADY_APPLIED does not count: it means that another row has the cancel.
SELECT :changed, CAST(0 AS BIGINT) AS deliver_at FROM outcomes WHERE :is_cancel AND ledger_id >= 0

-- restored --
-- `attempt` is that of a retry, which restores its message, too.
SELECT :changed, topic AS source, coalesce(attempt, 0) AS attempt FROM delayed_index WHERE operation = 'RESTORE'
UNION ALL SELECT :changed, topic AS source, coalesce(attempt, 0) AS attempt FROM outcomes WHERE :is_restore

-- moves --
-- A MOVE row does not have the time to which the message was moved; the other rows do. Recurring messages are left out,
-- but for MOVE rows of those that have no further occurrence.
SELECT :changed, deliver_at, CAST(operation = 'DELAY' AS INT) AS is_time_known, topic AS source,
       coalesce(attempt, 0) AS attempt, CAST(NULL AS VARCHAR) AS reason
FROM delayed_index
WHERE (operation = 'MOVE' OR (operation = 'DELAY' AND sequence IS NOT NULL)) AND occurrence IS NULL
UNION ALL SELECT :changed, coalesce(deliver_at, 0), 1, topic AS source, coalesce(attempt, 0), reason
FROM outcomes WHERE (:effect = 'MOVE' OR (:is_restore AND attempt IS NOT NULL)) AND occurrence IS NULL

-- delays --
SELECT topic, partition, subscription, ledger_id, entry_id, batch_index, batch_size, deliver_at,
       coalesce(sequence, 0) AS sequence, was_due, expires_at, CAST(occurrence IS NOT NULL AS INT) AS recurs
FROM delayed_index WHERE operation = 'DELAY' AND :are_wanted

-- rows_to_copy --
SELECT * FROM delayed_index WHERE operation = 'DELAY' AND :condition AND ledger_id BETWEEN :first AND :last
