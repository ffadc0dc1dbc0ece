-- in_partition --
topic = :topic AND partition = :partition AND ledger_id < :first_imported_ledger

-- last_published --
SELECT publish_time FROM entries WHERE :in_partition ORDER BY ledger_id DESC, entry_id DESC LIMIT :last_entries

-- known_entries --
SELECT ledger_id AS old_ledger, entry_id AS old_entry, publish_time, producer_name, batch_size FROM entries
WHERE :in_partition AND publish_time >= :since ORDER BY ledger_id, entry_id

-- later_entries --
SELECT DISTINCT ledger_id AS old_ledger, entry_id AS old_entry, publish_time, producer_name, batch_size
FROM delayed_index
WHERE :in_partition AND operation = 'DELAY' AND (ledger_id > :ledger OR (ledger_id = :ledger AND entry_id > :entry))
ORDER BY ledger_id, entry_id
