-- key --
key = :value

-- producer_name --
producer_name = :value

-- property --
properties[:name] = :value

-- due_before --
deliver_at < :value

-- ledger_id --
ledger_id = :value

-- entry_id --
entry_id = :value

-- deliver_at --
deliver_at = :value
