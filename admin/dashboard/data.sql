-- request_of_call --
-- The request id of a call: those of its commands have a number behind it.
regexp_replace(request_id, '[.][0-9]+$', '')

-- key_of_call --
-- The idempotency key of a call: its request id has a digest of role and topic behind it.
regexp_replace(request_id, '~[0-9a-f]{12}([.][0-9]+)?$', '')

-- is_call --
:request IN (request_id, :request_of_call, :key_of_call)

-- is_command --
-- A row is none of the answers to messages with a request id, which are as many as messages may be.
(operation IS DISTINCT FROM :of_messages)

-- changes --
-- The newest outcomes; equal ones of one call are one row. `is_cut`: there may be more of them than were read.
SELECT :shared, max(applied_at) AS applied_at, max(sequence) AS sequence, count(*) AS n, max(ledger_id) AS ledger_id,
       max(entry_id) AS entry_id, max(batch_index) AS batch_index,
       sum(count(*)) OVER () = :n_read AND min(applied_at) = min(min(applied_at)) OVER () AS is_cut
FROM (
    SELECT :request_of_call AS request, topic, subscription, operation, result, issued_by, reason, ledger_id, entry_id,
           batch_index, applied_at, sequence
    FROM outcomes WHERE :conditions ORDER BY applied_at DESC, sequence DESC LIMIT :n_read
) AS o
GROUP BY :shared ORDER BY applied_at DESC, sequence DESC LIMIT :n

-- shared --
-- The columns in which the outcomes of a row of `changes` are equal.
request, topic, subscription, operation, result, issued_by, reason

-- equals --
:column = :value

-- outcomes_of_row --
SELECT * FROM outcomes
WHERE :in_topics AND :request_of_call = :request AND result = :result
    AND coalesce(subscription, '') = :subscription
ORDER BY sequence, entry_id, batch_index LIMIT :n

-- refusals --
SELECT * FROM refusals WHERE :condition ORDER BY refused_at DESC LIMIT :n

-- attempts --
SELECT * FROM attempts WHERE :conditions ORDER BY applied_at DESC, ledger_id DESC, entry_id DESC LIMIT :n

-- waiting --
sent_at IS NULL AND attempt > 0

-- dead --
is_dead_letter

-- redriven --
attempt = 0
