-- rejects --
-- The second condition leaves out rows that never go to a rejects topic, or that the sender publishes there itself.
SELECT * FROM rejects
WHERE :in_topics AND NOT (reason LIKE :not_seen OR reason LIKE :left_out OR reason LIKE :not_taken)
ORDER BY batch_id, ledger_id, entry_id, batch_index, reason

-- in_topic --
(topic = :topic AND batch_id >= :tick)
