-- known_entries --
-- Of a place that was lost with its broker only the delayed index may have an entry.
SELECT partition, ledger_id, entry_id FROM entries WHERE topic = :topic AND ledger_id IN (:ledgers)
UNION
SELECT partition, ledger_id, entry_id FROM delayed_index
WHERE operation = 'DELAY' AND topic = :topic AND ledger_id IN (:ledgers)
