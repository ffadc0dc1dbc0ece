-- pause_changes --
SELECT topic, subscription, :effect AS effect FROM outcomes WHERE :of_topic AND :is_pause_change ORDER BY sequence

-- is_of_topic --
topic = :topic
