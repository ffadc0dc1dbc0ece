-- known_entries --
SELECT DISTINCT partition, ledger_id, entry_id FROM entries WHERE topic = :topic AND ledger_id IN (:ledgers)
