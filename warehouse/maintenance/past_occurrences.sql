-- message --
ledger_id, entry_id, batch_index

-- done_occurrences --
SELECT subscription, :message, occurrence, occurrence_at AS at FROM deliveries
WHERE occurrence IS NOT NULL AND :in_ledgers
UNION ALL
SELECT subscription, :message, occurrence, deliver_at FROM outcomes
WHERE occurrence IS NOT NULL AND :is_skipped_occurrence AND :in_ledgers

-- first_rows --
SELECT :message, publish_time, properties FROM delayed_index
WHERE operation = 'DELAY' AND occurrence IS NOT NULL AND sequence IS NULL AND :in_ledgers

-- with_later_row --
SELECT DISTINCT :message FROM delayed_index
WHERE operation = 'DELAY' AND occurrence IS NOT NULL AND sequence IS NOT NULL AND deliver_at >= :horizon AND :in_ledgers
