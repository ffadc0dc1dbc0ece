-- create_completed --
-- A table that an earlier version of the program has written, with the columns that it lacks.
CREATE VIEW :name AS SELECT *, :nulls FROM :written

-- null_column --
CAST(NULL AS :type) AS :column
