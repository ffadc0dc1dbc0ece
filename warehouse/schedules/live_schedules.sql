-- live_schedules --
-- The number of live recurring messages by topic and subscription.
WITH live AS (
    SELECT i.topic, s.subscription, i.ledger_id, i.entry_id, greatest(i.batch_index, 0) AS message
    FROM delayed_index AS i
    JOIN (VALUES :subscriptions) AS s (topic, subscription)
        ON s.topic = i.topic AND s.subscription = coalesce(i.subscription, s.subscription)
    WHERE i.operation = 'DELAY' AND i.occurrence IS NOT NULL AND i.deliver_at >= :now
    UNION
    SELECT topic, subscription, ledger_id, entry_id, greatest(batch_index, 0) AS message
    FROM deliveries AS d WHERE occurrence IS NOT NULL AND sent_at >= :since AND NOT :before
),
commands AS (
    SELECT subscription, ledger_id, entry_id, batch_index,
           max(CASE WHEN :is_cancel THEN coalesce(sequence, 0) END) AS cancelled,
           max(CASE WHEN :is_restore THEN sequence END) AS restored
    FROM outcomes WHERE (:is_cancel) OR :is_restore GROUP BY subscription, ledger_id, entry_id, batch_index
)
SELECT live.topic, live.subscription, count(*) AS n FROM live
:join_commands
WHERE NOT (:is_cancelled) GROUP BY live.topic, live.subscription
