-- all_schemas --
SELECT * FROM schemas ORDER BY seen_at DESC

-- in_topic --
SELECT * FROM schemas WHERE topic = :topic ORDER BY seen_at DESC
