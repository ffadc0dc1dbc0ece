-- is_first --
-- A row of `outcomes` is the first answer to its request, and not the answer to a repeat of it.
coalesce(reason, '') NOT IN (:reasons_of_repeats)

-- first_answers --
SELECT :columns, result AS name, reason, deliver_at, batch_id AS tick FROM outcomes
WHERE request_id IN (:request_ids) AND applied_at > :after AND :is_first
ORDER BY tick, ledger_id, entry_id, batch_index, subscription, result

-- bodies --
SELECT request_id, coalesce(max(command_hash), 0) AS body FROM outcomes
WHERE applied_at > :after AND :is_first AND (operation IS DISTINCT FROM :of_messages) GROUP BY request_id ORDER BY request_id

-- message_bodies --
-- Renumbered messages are left out: those that did not reach the tables come again, with other ids.
SELECT topic, request_id, min(command_hash) AS body FROM outcomes
WHERE applied_at > :after AND operation = :of_messages AND result = 'APPLIED' AND ledger_id < :first_renumbered
GROUP BY topic, request_id ORDER BY min(applied_at), request_id
