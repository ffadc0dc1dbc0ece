-- message --
subscription, ledger_id, entry_id, batch_index

-- first_rows --
-- The first rows of recurring messages, which stay as long as they recur.
SELECT ledger_id, entry_id, batch_index, partition, batch_size, deliver_at, properties, key, schedule_key, publish_time,
       producer_name
FROM delayed_index
WHERE operation = 'DELAY' AND occurrence IS NOT NULL AND sequence IS NULL AND topic = :topic AND :in_partition
    AND :condition
ORDER BY ledger_id, entry_id, batch_index LIMIT :n

-- in_partition --
partition = :partition

-- is_entry --
ledger_id = :ledger AND entry_id = :entry

-- is_message --
:is_entry AND greatest(batch_index, 0) = :batch_index

-- after --
ledger_id >= :ledger AND (ledger_id > :ledger OR entry_id > :entry OR (entry_id = :entry AND batch_index > :batch_index))

-- in_ledgers --
topic = :topic AND :in_ledgers

-- done --
SELECT :message, occurrence AS number, due AS by_rule, deliver_at AS at, delivered FROM (:last_occurrences) AS d

-- next --
SELECT * FROM (
    SELECT :message, deliver_at, occurrence_at, occurrence AS number, sequence,
           row_number() OVER (PARTITION BY :message ORDER BY sequence DESC) AS place
    FROM delayed_index
    WHERE operation = 'DELAY' AND occurrence IS NOT NULL AND sequence IS NOT NULL AND :in_ledgers
) AS r WHERE place = 1

-- last_commands --
SELECT :message, max(CASE WHEN :is_cancel THEN coalesce(sequence, 0) END) AS cancelled,
       max(CASE WHEN :effect = 'RESTORE' THEN sequence END) AS restored,
       max(CASE WHEN :effect = 'HOLD' THEN sequence END) AS paused,
       max(CASE WHEN :effect = 'RESUME' THEN sequence END) AS resumed
FROM outcomes WHERE :in_ledgers GROUP BY :message
