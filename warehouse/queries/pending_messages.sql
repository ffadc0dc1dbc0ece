-- last_candidate --
SELECT :order FROM candidates ORDER BY :descending LIMIT 1

-- candidates_alone --
SELECT :shown, CAST(0 AS BIGINT) AS waits FROM candidates

-- candidates --
SELECT * FROM candidates

-- page --
SELECT :shown, waits FROM (:waiting) AS p WHERE waits <> 0 ORDER BY :order LIMIT :n

-- due_from --
deliver_at >= :start

-- due_between --
deliver_at >= :start AND deliver_at < :end

-- first_rows --
SELECT * FROM (:rows) AS r ORDER BY :order LIMIT :n

-- begin_candidates --
CREATE OR REPLACE TABLE candidates AS :first_rows

-- add_candidates --
CREATE OR REPLACE TABLE candidates AS SELECT * FROM candidates UNION ALL SELECT * FROM (:first_rows) AS r

-- count_candidates --
SELECT count(*) AS n FROM candidates

-- count --
SELECT count(*) AS n FROM (:rows) AS p WHERE waits <> 0

-- histogram --
-- A span is divided in two at `begin`.
SELECT CASE WHEN deliver_at < :begin THEN :span ELSE greatest(:span, :begin) END AS at, :counts
FROM (:rows) AS p WHERE waits <> 0 AND deliver_at < :held GROUP BY 1

-- span --
deliver_at / :width * :width

-- count_of_subscription --
count(*) FILTER (WHERE waits & :bit <> 0) AS :name

-- stats --
SELECT count(*) FILTER (WHERE waits <> 0) AS messages, :columns FROM (:rows) AS p

-- stats_of_subscription --
count(*) FILTER (WHERE waits & :bit <> 0) AS pending_:i,
:horizons,
count(*) FILTER (WHERE waits & :bit <> 0 AND deliver_at = :held) AS held_:i,
min(deliver_at) FILTER (WHERE waits & :bit <> 0 AND deliver_at < :held) AS min_:i,
max(deliver_at) FILTER (WHERE waits & :bit <> 0 AND deliver_at < :held) AS max_:i

-- due_within_horizon --
count(*) FILTER (WHERE waits & :bit <> 0 AND deliver_at < :end) AS :name

-- cancelled --
-- The number of cancelled messages, or whole entries, that would be due later, by subscription.
SELECT subscription, count(*) AS n FROM (
    SELECT subscription, ledger_id, entry_id, batch_index
    FROM :commands WHERE operation IN ('CANCEL', 'RESTORE') AND :in_topic AND deliver_at > :as_of
    GROUP BY subscription, ledger_id, entry_id, batch_index
    HAVING max(CASE WHEN operation = 'CANCEL' THEN :sequence END)
        > coalesce(max(CASE WHEN operation = 'RESTORE' THEN :sequence END), -1)
) AS c GROUP BY subscription
