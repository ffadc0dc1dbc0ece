-- effect --
-- The effect of a row of `outcomes`, a value of Effect; null: it had none. Rows of an earlier version have no column for
-- it.
coalesce(effect, CASE WHEN result IN (:applied) THEN CASE operation :effect_of_operation END END)

-- is_cancel --
-- A row of `outcomes` cancelled its message or entry.
(:effect = 'CANCEL' AND occurrence IS NULL)

-- is_restore --
-- A row of `outcomes` undid earlier cancels of its message, as a retry does, too.
(:effect = 'RESTORE')

-- is_skipped_occurrence --
-- A row of `outcomes` is about an occurrence that is not delivered: it was skipped, or its destination did not take it.
(:effect = 'CANCEL' AND occurrence IS NOT NULL)

-- is_pause_change --
-- A row of `outcomes` paused a subscription, or ended its pause.
(:effect IN ('HOLD', 'RESUME') AND occurrence IS NULL)

-- message --
topic, subscription, ledger_id, entry_id, batch_index

-- last_occurrences --
-- A row for each subscription and recurring message: its last occurrence that is done. Columns beside the message's:
-- `occurrence`, the number of the last one that was delivered or skipped; `due`, when it was due by the rule, and
-- `deliver_at`, when in fact; `delivered`, the number of delivered ones; `done_at`, when the last one was delivered or
-- skipped.
SELECT :message, max(occurrence) AS occurrence, max(due) AS due,
       max(CASE WHEN occurrence = newest THEN deliver_at END) AS deliver_at,
       count(sent_at) AS delivered, max(done_at) AS done_at
FROM (
    SELECT *, max(occurrence) OVER (PARTITION BY :message) AS newest
    FROM (
        SELECT :message, occurrence, deliver_at, coalesce(occurrence_at, deliver_at) AS due, sent_at,
               sent_at AS done_at
        FROM deliveries WHERE occurrence IS NOT NULL AND :condition
        UNION ALL
        SELECT :message, occurrence, deliver_at, deliver_at AS due, CAST(NULL AS BIGINT), applied_at
        FROM outcomes WHERE :is_skipped_occurrence AND :condition
    ) AS each_one
) AS done
GROUP BY :message

-- last_commands --
-- A row for each subscription and message (or whole entry) named by commands: the sequence of the last command of each
-- kind; null: none.
SELECT :message,
       max(CASE WHEN effect = 'CANCEL' THEN sequence END) AS cancelled,
       max(CASE WHEN effect = 'RESTORE' THEN sequence END) AS restored,
       max(CASE WHEN effect = 'MOVE' THEN sequence END) AS moved
FROM (
    SELECT :message, :effect AS effect, coalesce(sequence, 0) AS sequence
    FROM outcomes WHERE :is_cancel OR :is_restore
    UNION ALL
    SELECT :message, operation AS effect, sequence
    FROM delayed_index WHERE operation = 'MOVE'
) AS commands
GROUP BY :message

-- join_commands --
LEFT JOIN (SELECT * FROM :commands WHERE :has_one) AS one
    ON one.ledger_id = :row.ledger_id AND one.entry_id = :row.entry_id AND :for_one AND one.batch_index = :batch_index
LEFT JOIN (SELECT * FROM :commands WHERE :has_whole AND batch_index = -1) AS whole
    ON whole.ledger_id = :row.ledger_id AND whole.entry_id = :row.entry_id AND :for_whole

-- message_number --
greatest(:row.batch_index, 0)

-- for_subscription --
:commands.subscription = :subscription

-- last --
-- The greater of a column's values for the message and for its whole entry; -1 if both are null.
greatest(coalesce(one.:column, -1), coalesce(whole.:column, -1))

-- comes_after --
:last > coalesce(:sequence, 0)
