-- sealed --
-- The rows of messages that are in the delayed index; a subscription that is null stands for all.
SELECT ledger_id, entry_id, batch_index, subscription FROM delayed_index WHERE operation = 'DELAY' AND :near

-- delivered --
SELECT ledger_id, entry_id, batch_index, subscription FROM deliveries WHERE :near

-- changed --
-- What was cancelled, moved or has expired, for a subscription: a row in the delayed index says what is pending of it.
SELECT ledger_id, entry_id, batch_index, subscription FROM outcomes
WHERE :near AND :effect IN ('CANCEL', 'MOVE') AND occurrence IS NULL

-- rejected --
SELECT ledger_id, entry_id, batch_index, CAST(NULL AS VARCHAR) AS subscription FROM rejects WHERE :near
