-- is_own --
-- A row is for one subscription, or an occurrence of a recurring message.
(subscription IS NOT NULL OR occurrence IS NOT NULL)

-- is_later --
deliver_at >= :begin AND deliver_at < :end

-- due_before --
deliver_at < :time

-- due_after --
deliver_at > :time

-- in_partition --
partition = :partition

-- examined --
SELECT :columns FROM examined

-- both --
:first UNION ALL :second

-- examined_times --
SELECT deliver_at FROM special WHERE operation <> 'DELAY' AND :in_partition UNION ALL SELECT deliver_at FROM examined

-- end_of_others --
SELECT :function(deliver_at) AS t FROM (:others) AS o LEFT ANTI JOIN named AS n
    ON n.ledger_id = o.ledger_id AND n.entry_id = o.entry_id
WHERE deliver_at < :held

-- create_special --
-- Rows that are not of type DELAY, are for one subscription, or have an occurrence.
CREATE OR REPLACE TABLE special AS
SELECT topic, subscription, partition, ledger_id, entry_id, batch_index, deliver_at, operation, :sequence AS sequence,
       occurrence
FROM delayed_index WHERE :in_topic AND deliver_at >= :start AND (operation <> 'DELAY' OR (:is_own AND :is_later))

-- create_named --
-- The entries that commands name.
CREATE OR REPLACE TABLE named AS
SELECT DISTINCT ledger_id, entry_id FROM special
WHERE operation = 'MOVE' OR (operation = 'CANCEL' AND deliver_at >= :begin)

-- named --
SELECT ledger_id, entry_id FROM named

-- create_examined --
-- The DELAY rows due later that are special or of a named entry.
CREATE OR REPLACE TABLE examined AS
SELECT :columns FROM special WHERE operation = 'DELAY' AND :in_partition

-- create_examined_with_named --
:create_examined
UNION ALL
SELECT r.* FROM (:named_rows) AS r LEFT SEMI JOIN named AS n ON n.ledger_id = r.ledger_id AND n.entry_id = r.entry_id
