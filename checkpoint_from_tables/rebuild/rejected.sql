-- comes_again --
-- Leaves out what is no message that came in, or was accepted when it did.
topic IN (:topics) AND NOT (reason LIKE :not_seen OR reason LIKE :not_delivered)

-- rejected --
SELECT topic, partition, ledger_id, entry_id, batch_index, position, reason FROM rejects WHERE :comes_again
