-- delays --
SELECT topic, partition, ledger_id, entry_id, batch_index, deliver_at, subscription, sequence, schedule_key, key_since,
       attempt
FROM delayed_index WHERE operation = 'DELAY' AND :condition

-- due_before --
deliver_at < :end

-- due_from --
deliver_at >= :start

-- single_due_before --
deliver_at < :end AND occurrence IS NULL

-- held_for --
deliver_at >= :held AND topic = :topic AND subscription = :subscription

-- resumed --
SELECT topic, subscription, max(applied_at) AS at FROM outcomes
WHERE :effect = 'RESUME' AND occurrence IS NULL GROUP BY topic, subscription
