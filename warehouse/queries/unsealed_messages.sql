-- sealed --
-- The rows of messages that are in the delayed index; a subscription that is null stands for all.
SELECT ledger_id, entry_id, batch_index, subscription FROM delayed_index WHERE operation = 'DELAY' AND :near

-- delivered --
SELECT ledger_id, entry_id, batch_index, subscription FROM deliveries WHERE :near

-- changed --
-- What commands, or the job, did to messages for a subscription: each row is one change.
SELECT ledger_id, entry_id, batch_index, subscription, :effect AS effect, coalesce(sequence, 0) AS sequence, deliver_at
FROM outcomes WHERE :near AND :effect IN ('CANCEL', 'MOVE', 'RESTORE')

-- rejected --
SELECT ledger_id, entry_id, batch_index, CAST(NULL AS VARCHAR) AS subscription FROM rejects WHERE :near
