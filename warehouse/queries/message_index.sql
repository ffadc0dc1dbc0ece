-- in_topic --
topic = :topic AND ledger_id < :first_imported_ledger

-- in_partition --
:in_topic AND partition = :partition

-- with_index --
-- The lower bound lets the reader skip files. Indexes of a topic that was deleted and created again are there twice:
-- those in the highest ledgers count.
SELECT ledger_id, entry_id, first_index FROM entries
WHERE :in_partition AND first_index BETWEEN :least AND :index AND first_index + batch_size > :index
ORDER BY ledger_id DESC LIMIT 1

-- after_index --
SELECT ledger_id, entry_id, first_index FROM entries
WHERE :in_partition AND first_index > :index ORDER BY first_index LIMIT 1

-- known --
SELECT count(*) AS entries, count(first_index) AS indexed, min(first_index) AS "first",
       max(first_index + batch_size) AS "end"
FROM entries WHERE :in_partition

-- any_partition --
SELECT 1 FROM entries WHERE :in_topic LIMIT 1
