-- pause_changes --
SELECT topic, subscription, :effect AS effect FROM outcomes WHERE :in_topic AND :is_pause_change ORDER BY sequence

-- in_topic --
topic = :topic
