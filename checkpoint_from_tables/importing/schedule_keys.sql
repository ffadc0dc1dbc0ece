-- first_waiting --
SELECT DISTINCT schedule_key, :position FROM pending
WHERE topic = :topic AND schedule_key IS NOT NULL AND attempt IS NULL
