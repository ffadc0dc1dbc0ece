-- last_entries --
-- The last entry of each ledger in a table.
SELECT topic, partition, ledger_id, max(entry_id) AS entry_id FROM :table WHERE ledger_id < :first_imported_ledger
GROUP BY topic, partition, ledger_id

-- pause_changes --
SELECT topic, subscription, :effect AS effect FROM outcomes WHERE :is_pause_change ORDER BY sequence

-- shaped_until --
SELECT topic, subscription, max(deliver_at) AS last FROM delayed_index
WHERE operation = 'DELAY' AND shaped_from IS NOT NULL AND deliver_at >= :now AND deliver_at < :held
GROUP BY topic, subscription

-- parked --
-- Recurring messages are left out: a rebuild gives their occurrences new rows.
SELECT * FROM delayed_index WHERE operation = 'DELAY' AND deliver_at = :held AND occurrence IS NULL AND :may_expire

-- has_end --
expires_at IS NOT NULL

-- in_topics --
(expires_at IS NOT NULL OR topic IN (:topics))

-- ledgers --
SELECT DISTINCT topic, partition, ledger_id FROM delayed_index
WHERE operation = 'DELAY' AND ledger_id < :first_imported_ledger

-- last_tick --
SELECT coalesce(max(:column), 0) AS t FROM :table
