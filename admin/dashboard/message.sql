-- is_entry --
topic = :topic AND ledger_id = :ledger AND entry_id = :entry

-- is_message --
-- A row is of a message, or of its whole entry.
topic = :topic AND ledger_id = :ledger AND entry_id = :entry AND batch_index IN (-1, :batch_index)

-- published --
SELECT DISTINCT publish_time, batch_size FROM entries WHERE :condition

-- index_rows --
SELECT * FROM delayed_index WHERE :condition AND operation = 'DELAY'

-- first_index_row --
:index_rows ORDER BY coalesce(sequence, 0), batch_index LIMIT 1

-- outcomes --
SELECT *, :effect AS had_effect FROM outcomes WHERE :condition

-- deliveries --
SELECT * FROM deliveries WHERE :condition
