-- written --
SELECT :columns FROM :table WHERE batch_id IN (:ticks) AND :conditions

-- of_topic --
topic = :topic

-- of_subscription --
subscription = :subscription

-- of_request --
request_id = :request_id

-- with_reason --
starts_with(reason, :reason)
