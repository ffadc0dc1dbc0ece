-- indexed --
SELECT :position AS position, deliver_at FROM delayed_index WHERE operation = 'DELAY'

-- delivered --
SELECT position, subscription, deliver_at FROM deliveries

-- entries --
SELECT concat_ws(':', ledger_id, entry_id, partition) AS entry, publish_time FROM entries

-- rejected --
SELECT position FROM rejects
