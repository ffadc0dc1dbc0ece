-- unfinished_ledgers --
SELECT DISTINCT ledger_id FROM imported WHERE topic = :topic AND imported_at IS NULL

-- part --
SELECT * FROM imported WHERE topic = :topic AND ledger_id = :ledger ORDER BY entry_id

-- items --
SELECT item FROM imported WHERE topic = :topic
