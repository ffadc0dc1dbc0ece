-- commands_for_later --
-- The commands for later subscriptions of a topic that had an effect, but for those answered for one before, when the
-- settings had it.
SELECT o.request_id, o.topic, o.partition, o.ledger_id, o.entry_id, o.batch_index, o.operation, o.deliver_at,
       o.issued_by, o.issued_at, o.sequence, :effect AS effect
FROM outcomes AS o
LEFT ANTI JOIN (SELECT * FROM outcomes WHERE topic = :topic AND subscription = :subscription) AS own
    ON own.request_id = o.request_id AND own.ledger_id = o.ledger_id AND own.entry_id = o.entry_id
WHERE o.topic = :topic AND o.subscription = :also_later AND :effect IS NOT NULL
ORDER BY o.sequence, o.ledger_id, o.entry_id, o.batch_index
