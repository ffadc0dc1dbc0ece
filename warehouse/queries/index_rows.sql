-- delay_due_in --
-- Times are ms since the epoch; the end is exclusive.
deliver_at >= :start AND deliver_at < :end AND operation = 'DELAY'

-- as_it_came --
operation = 'DELAY' AND sequence IS NULL

-- rows_due --
SELECT deliver_at / :slot_millis AS slot, count(*) AS n
FROM delayed_index WHERE :delay_due_in
GROUP BY 1 ORDER BY 1

-- index_rows --
SELECT :columns FROM delayed_index WHERE :condition

-- count_index_rows --
SELECT count(*) AS n FROM delayed_index WHERE :condition

-- in_topics --
topic IN (:topics)

-- topics_with_large --
SELECT DISTINCT topic FROM delayed_index WHERE :condition AND :size >= :n_bytes

-- large_due --
SELECT deliver_at, ledger_id, entry_id, sum(coalesce(:size, 0)) AS n
FROM delayed_index WHERE :condition
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT :max_large_rows

-- large_waiting --
SELECT topic, count(*) AS messages, sum(coalesce(:size, 0)) AS n_bytes, min(deliver_at) AS since
FROM delayed_index WHERE :condition GROUP BY 1 ORDER BY 1

-- delay_due_up_to --
deliver_at >= :first AND deliver_at <= :last AND operation = 'DELAY'

-- entries_after --
entry_id > :first AND entry_id <= :last

-- comes_after --
(deliver_at > :due OR (deliver_at = :due AND (ledger_id > :ledger OR (ledger_id = :ledger AND entry_id > :entry))))

-- is_large --
-- A row is loaded in turn; never null.
((coalesce(:size, 0) >= :n_bytes AND :is_other) OR :is_in_order)

-- is_ordinary --
schedule_key IS NULL AND occurrence IS NULL

-- known_size --
payload_bytes

-- counted_size --
-- It takes the length of texts alone.
coalesce(payload_bytes, octet_length(encode(payload, 'hex')) / 2)

-- has_unknown_size --
payload_bytes IS NULL AND payload IS NOT NULL

-- entries_as_known --
SELECT topic, partition, ledger_id, entry_id, CAST(-1 AS INT) AS batch_index, batch_size, CAST(0 AS BIGINT) AS deliver_at
FROM entries WHERE :near

-- times_of_entries --
SELECT topic, ledger_id, entry_id, first_due, coalesce(last_due, first_due) AS last_due
FROM entries WHERE :near AND first_due IS NOT NULL

-- keyed_messages --
SELECT :columns FROM delayed_index
WHERE :in_times AND topic IN (:topics) AND schedule_key IN (:keys) AND :as_it_came

-- waiting_entries --
SELECT ledger_id, entry_id FROM delayed_index WHERE :near AND :as_it_came AND deliver_at > :after

-- durable_entries --
SELECT ledger_id, entry_id FROM entries WHERE :near

-- moved_rows --
-- A moved row may be due at any time; the log's statistics show which files have moved rows.
SELECT :columns FROM delayed_index WHERE sequence IS NOT NULL AND :near AND operation = 'DELAY'

-- superseded --
SELECT :columns FROM outcomes WHERE :near AND result = 'SUPERSEDED'

-- rows_with_keys --
SELECT :columns FROM delayed_index WHERE schedule_key IN (:keys) AND operation = 'DELAY'

-- is_delay --
operation = 'DELAY'

-- is_entry_among --
(ledger_id = :ledger AND entry_id IN (:entries))

-- may_be_entry --
ledger_id IN (:ledgers) AND entry_id IN (:entries)

-- between_ledgers --
ledger_id BETWEEN :first AND :last

-- between_entries --
(ledger_id = :ledger AND entry_id BETWEEN :first AND :last)
