-- is_entry --
SELECT producer_name, publish_time FROM entries
WHERE ledger_id = :ledger AND entry_id = :entry AND producer_name IS NOT NULL

-- in_partition --
topic = :topic AND partition = :partition AND ledger_id < :first_imported_ledger

-- well_before --
-- The last entry that was published so long before another one that no chunk of a message lies between.
SELECT ledger_id, entry_id FROM entries
WHERE :in_partition AND publish_time < (
    SELECT max(publish_time) FROM entries WHERE :in_partition AND ledger_id = :ledger AND entry_id = :entry
) - :chunks_millis
ORDER BY ledger_id DESC, entry_id DESC LIMIT 1
