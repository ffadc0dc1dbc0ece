-- one_sent_before --
SELECT 1 AS one FROM deliveries
WHERE topic = :topic AND subscription = :subscription AND destination = :destination AND sent_at < :before LIMIT 1
