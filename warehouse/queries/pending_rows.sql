-- sequence --
coalesce(sequence, 0)

-- known_sequence --
coalesce(sequence, 0) AS sequence

-- in_topic --
topic = :topic

-- in_partition --
partition = :partition

-- due_from --
deliver_at >= :start

-- delayed --
SELECT :columns FROM delayed_index WHERE operation = 'DELAY' AND :conditions

-- comes_after --
:column > :value

-- comes_after_in_order --
(:column > :value OR (:column = :value AND :rest))

-- commands_done --
SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, operation, :sequence AS sequence,
       CAST(NULL AS BIGINT) AS occurrence
FROM :commands WHERE operation <> 'DELAY' AND :wanted

-- all_done --
:commands_done UNION ALL
SELECT subscription, ledger_id, entry_id, batch_index, deliver_at, 'DELIVERED', 0, occurrence
FROM deliveries WHERE :wanted AND deliver_at <= :as_of

-- done_of_entries --
SELECT d.* FROM (:done) AS d LEFT SEMI JOIN :entries AS o ON o.ledger_id = d.ledger_id AND o.entry_id = d.entry_id

-- ledgers --
SELECT DISTINCT ledger_id FROM :entries ORDER BY 1

-- last_done --
-- The last of what was done with a message for one subscription, with the subscription's number at the columns' names.
max(CASE WHEN subscription = :name AND operation = 'DELIVERED' THEN deliver_at END) AS delivered_:i,
max(CASE WHEN subscription = :name AND operation = 'DELIVERED' THEN occurrence END) AS occurrence_:i,
max(CASE WHEN subscription = :name AND operation = 'CANCEL' THEN deliver_at END) AS cancelled_until_:i,
max(CASE WHEN subscription = :name AND operation = 'CANCEL' THEN sequence END) AS cancelled_:i,
max(CASE WHEN subscription = :name AND operation = 'RESTORE' THEN sequence END) AS restored_:i,
max(CASE WHEN subscription = :name AND operation = 'MOVE' THEN sequence END) AS moved_:i

-- create_done --
CREATE OR REPLACE TABLE done AS
SELECT ledger_id, entry_id, batch_index, :last_done_of_each
FROM (:done) AS d GROUP BY ledger_id, entry_id, batch_index

-- count_done --
SELECT count(*) AS n, count(*) FILTER (WHERE batch_index = -1) AS whole FROM done

-- waits_for --
-- The bit of one subscription in the column `waits`.
CASE WHEN :is_left AND NOT :missed THEN :bit ELSE 0 END

-- is_left --
-- A row (`i`) is for one subscription, and was not delivered there; it is cancelled there, or not.
coalesce(i.subscription, :name) = :name AND NOT (:is_moved_on)
AND CASE WHEN i.occurrence IS NULL THEN :delivered < i.deliver_at ELSE :occurrence < i.occurrence END
AND (:cancelled_until >= i.deliver_at AND :is_cancelled) = :is_cancelled_wanted

-- waiting --
SELECT i.*, :waits AS waits FROM (:rows) AS i :join_commands

-- first_times --
SELECT deliver_at FROM (:rows) AS r ORDER BY deliver_at LIMIT :n
