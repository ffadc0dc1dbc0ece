-- all_changes --
SELECT * FROM subscription_changes ORDER BY batch_id, changed_at

-- came_by --
-- The message of a row came by a moment, by the last entry ingested of its partition.
(:row.partition = :partition AND :row.ledger_id >= :first_ledger
    AND (:row.ledger_id < :ledger OR (:row.ledger_id = :ledger AND :row.entry_id <= :entry)))

-- was_there_by --
-- A row that was written later for one subscription was there if its sequence is lower.
(CASE WHEN coalesce(:sequence, 0) = 0 THEN :came_by ELSE :sequence < :moment END)

-- handed_out_by --
(:was_there AND coalesce(:due, 0) <= :handed_out)

-- handed_out_between --
(:topic = :of_topic AND :subscription = :of_subscription AND :until AND NOT :since)

-- handed_out_before --
(:topic = :of_topic AND :subscription = :of_subscription AND :until)
