-- rejects --
SELECT * FROM rejects WHERE :condition ORDER BY batch_id, ledger_id, entry_id, batch_index, reason

-- entries --
-- The first entries with rejects, in the order in which they are sent.
SELECT batch_id, ledger_id, entry_id, count(*) AS n, sum(coalesce(:size, 0)) AS n_bytes
FROM rejects WHERE :condition
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT :most

-- properties_size --
-- Of names and values, bytes.
coalesce(
    octet_length(array_to_string(map_keys(properties), '')) + octet_length(array_to_string(map_values(properties), '')),
    0
)

-- count_rejects --
SELECT count(*) AS n FROM rejects WHERE :condition

-- known_size --
payload_bytes

-- counted_size --
-- It takes the length of texts alone.
coalesce(payload_bytes, octet_length(encode(payload, 'hex')) / 2)

-- with_properties --
coalesce(:size, 0) + :properties_size

-- has_unknown_size --
payload_bytes IS NULL AND payload IS NOT NULL

-- in_topic --
topic = :topic AND batch_id >= :first

-- until_tick --
batch_id <= :last

-- comes_after --
(batch_id > :tick OR (batch_id = :tick AND (ledger_id > :ledger OR (ledger_id = :ledger AND entry_id > :entry))))

-- goes_there --
-- Leaves out rows that never go to a rejects topic, or that the sender publishes there itself.
NOT (reason LIKE :not_seen OR reason LIKE :left_out OR reason LIKE :not_taken)
