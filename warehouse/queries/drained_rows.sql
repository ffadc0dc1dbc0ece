-- held --
-- Messages that are parked for a subscription.
deliver_at = :held_deliver_at AND topic = :topic AND subscription = :subscription

-- places --
SELECT :place, was_due, payload_bytes FROM delayed_index WHERE :held AND operation = 'DELAY'

-- moves --
SELECT :place FROM delayed_index WHERE :held AND operation = 'MOVE'

-- rows --
SELECT * FROM delayed_index WHERE :held AND operation = 'DELAY' AND :was_due

-- was_due_from --
was_due >= :since

-- was_due_from_or_unknown --
-- What is not known when it was due comes last.
(was_due >= :since OR was_due IS NULL)

-- was_due_until --
was_due <= :until
