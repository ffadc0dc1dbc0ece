-- message --
topic, partition, ledger_id, entry_id, batch_index

-- sources --
SELECT :message, publish_time, properties, deliver_at FROM delayed_index
WHERE operation = 'DELAY' AND occurrence IS NOT NULL AND sequence IS NULL

-- number_from_last --
-- Numbers the rows of each message and subscription, from that with the highest sequence.
row_number() OVER (PARTITION BY subscription, ledger_id, entry_id, batch_index ORDER BY sequence DESC) AS place

-- last_rows --
SELECT * FROM (
    SELECT :message, subscription, sequence, occurrence, deliver_at, occurrence_at, :number_from_last
    FROM delayed_index WHERE occurrence IS NOT NULL AND sequence IS NOT NULL AND operation = 'DELAY'
) AS r WHERE place = 1

-- last_moves --
SELECT * FROM (
    SELECT :message, subscription, sequence, occurrence, deliver_at, :number_from_last
    FROM delayed_index WHERE occurrence IS NOT NULL AND sequence IS NOT NULL AND operation = 'MOVE'
) AS r WHERE place = 1

-- last_commands --
SELECT * FROM (
    SELECT :message, subscription, sequence, occurrence, deliver_at, :effect AS effect, :number_from_last
    FROM outcomes WHERE occurrence IS NOT NULL AND sequence IS NOT NULL AND :effect IN ('MOVE', 'HOLD', 'RESUME')
) AS r WHERE place = 1

-- skipped --
SELECT :message, subscription, occurrence, deliver_at, deliver_at AS occurrence_at, applied_at AS sent_at
FROM outcomes WHERE occurrence IS NOT NULL AND :is_skipped_occurrence
