-- positions_not_seen --
SELECT position FROM rejects
WHERE topic = :topic AND partition = :partition AND ledger_id BETWEEN :first AND :last AND reason LIKE :not_seen

-- last_index --
SELECT first_index + batch_size - 1 AS last_index FROM entries
WHERE topic = :topic AND partition = :partition AND ledger_id = :ledger AND entry_id = :entry
    AND first_index IS NOT NULL

-- durable_from --
SELECT ledger_id FROM entries
WHERE topic = :topic AND partition = :partition AND (ledger_id > :ledger OR ledger_id = :ledger AND entry_id >= :entry)
LIMIT 1
