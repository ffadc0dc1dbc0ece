-- last_delivery --
SELECT max(sent_at) AS t FROM deliveries

-- in_ledgers --
ledger_id IN (:ledgers)

-- between_ledgers --
ledger_id BETWEEN :first AND :last

-- last_occurrence_sent --
SELECT :message_columns, max(sent_at) AS last FROM deliveries
WHERE occurrence IS NOT NULL AND :in_ledgers_of_rows GROUP BY :message_columns

-- named --
topic, subscription, ledger_id, entry_id, batch_index, coalesce(sequence, 0) AS sequence

-- moves --
SELECT :named FROM delayed_index WHERE operation = 'MOVE' AND :in_ledgers_of_rows

-- cancels --
SELECT :named FROM outcomes WHERE :is_cancel AND :cancelled_when AND :in_ledgers_of_rows

-- restores --
SELECT :named FROM outcomes WHERE :is_restore AND :in_ledgers_of_rows

-- deliveries --
SELECT topic, subscription, ledger_id, entry_id, batch_index, coalesce(attempt, 0) AS attempt
FROM deliveries WHERE :delivered_when AND occurrence IS NULL

-- due_between --
deliver_at BETWEEN :first AND :last

-- sent_before --
:in_ledgers_of_rows AND sent_at < :horizon

-- applied_before --
applied_at < :horizon

-- last_entries --
SELECT topic, partition, ledger_id, max(entry_id) AS entry_id, last_value(publish_time ORDER BY entry_id) AS published
FROM entries
WHERE ledger_id < :first_imported_ledger GROUP BY topic, partition, ledger_id

-- entries_in_delayed_index --
SELECT ledger_id, entry_id FROM delayed_index WHERE :in_ledgers_of_rows AND operation = 'DELAY'

-- entries_in_entries --
SELECT ledger_id, entry_id FROM entries WHERE :in_ledgers_of_rows
