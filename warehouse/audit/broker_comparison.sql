-- in_partition --
topic = :topic AND partition = :partition AND ledger_id < :first_imported_ledger

-- last_before --
-- The last entry that was published before the horizon.
SELECT ledger_id, entry_id FROM entries WHERE :in_partition AND publish_time < :horizon
ORDER BY ledger_id DESC, entry_id DESC LIMIT 1

-- first --
SELECT ledger_id, entry_id FROM entries WHERE :in_partition ORDER BY ledger_id ASC, entry_id ASC LIMIT 1

-- entries_after --
SELECT ledger_id, entry_id, max(batch_size) AS batch_size, max(first_index) AS first_index FROM entries
WHERE :in_partition AND (ledger_id > :ledger OR (ledger_id = :ledger AND entry_id > :entry))
GROUP BY ledger_id, entry_id ORDER BY ledger_id, entry_id
