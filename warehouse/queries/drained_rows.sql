-- held --
-- Messages that are parked for a subscription.
deliver_at = :held_deliver_at AND topic = :topic AND subscription = :subscription

-- due_since --
-- What is not known when it was due comes last.
(was_due >= :since OR was_due IS NULL)

-- places --
SELECT :place, was_due, payload_bytes FROM delayed_index WHERE :held AND operation = 'DELAY' AND :due_since
ORDER BY was_due ASC NULLS LAST, sequence, ledger_id, entry_id, batch_index LIMIT :n

-- moves --
SELECT :place FROM delayed_index WHERE :held AND operation = 'MOVE' AND :near

-- count --
SELECT count(*) AS n, coalesce(sum(payload_bytes), 0) AS n_bytes
FROM delayed_index WHERE :held AND operation = 'DELAY' AND :due_since

-- parked --
-- How much was ever parked for each subscription, also what has gone out since, as far as it is kept.
SELECT topic, subscription, count(*) AS n, coalesce(sum(payload_bytes), 0) AS n_bytes
FROM delayed_index WHERE deliver_at = :held_deliver_at AND operation = 'DELAY' GROUP BY topic, subscription

-- rows --
SELECT :columns FROM delayed_index
WHERE :held AND operation = 'DELAY' AND :near AND sequence BETWEEN :lowest AND :highest AND :was_due

-- properties_size --
-- Of names and values, bytes.
coalesce(
    octet_length(array_to_string(map_keys(properties), '')) + octet_length(array_to_string(map_values(properties), '')),
    0
)

-- place_and_size --
:place, was_due, coalesce(payload_bytes, 0) + :properties_size AS size

-- was_due_from --
(was_due > :due OR (was_due = :due AND sequence >= :sequence))

-- was_due_from_or_unknown --
(was_due > :due OR (was_due = :due AND sequence >= :sequence) OR was_due IS NULL)

-- was_due_until --
(was_due < :due OR (was_due = :due AND sequence <= :sequence))
