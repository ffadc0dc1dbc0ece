-- waiting --
-- The rows of `outcomes` with the result WAITING and no later outcome. A skip of a whole entry may have a later outcome
-- for each of its messages; a message that is an entry is named by the batch index 0, too. Cancels and reschedules
-- without a time, which earlier versions of the program wrote, are left out: `delayed_index` has the time of a cancel.
-- Another command under the same request id is refused for `other_body`: that is no answer to this one.
SELECT * FROM :outcomes AS w
LEFT ANTI JOIN (SELECT * FROM :outcomes WHERE result <> 'WAITING' AND coalesce(reason, '') <> :other_body) AS a
    ON a.request_id = w.request_id AND a.subscription = w.subscription AND a.ledger_id = w.ledger_id
    AND a.entry_id = w.entry_id AND (a.batch_index = w.batch_index OR w.batch_index <= 0)
WHERE w.result = 'WAITING' AND (w.deliver_at IS NOT NULL OR w.operation NOT IN ('CANCEL', 'RESCHEDULE'))

-- outcomes_of --
(SELECT * FROM outcomes WHERE topic IN (:topics))

-- waiting_commands --
-- A row for each subscription, in the order in which the commands came.
SELECT :command, subscription FROM (:waiting) AS w GROUP BY :command, subscription
ORDER BY min(batch_id), min(sequence), request_id, ledger_id, entry_id, batch_index, subscription
