-- last --
-- The outcomes of the newest batch with any: a batch writes its outcomes after those of the batch before were published.
-- Commands that this batch has read are not acknowledged: they come again, and are answered then. Those that an earlier
-- broker had do not.
SELECT * FROM outcomes AS o LEFT SEMI JOIN (SELECT max(batch_id) AS newest FROM outcomes) ON o.batch_id = newest
WHERE o.command_hash IS NULL
    OR o.applied_at < :of_earlier_broker
    OR o.request_id IN (SELECT request_id FROM outcomes WHERE batch_id < (SELECT max(batch_id) FROM outcomes))
ORDER BY sequence, request_id, ledger_id, entry_id, batch_index, subscription
