-- all_ranges --
SELECT * FROM expired

-- around --
SELECT min(first_index) AS "first", min(CASE WHEN end_index > :index THEN end_index END) AS "end"
FROM expired WHERE topic = :topic AND partition = :partition

-- left_between --
SELECT first_index FROM entries
WHERE topic = :topic AND partition = :partition AND first_index BETWEEN :first AND :last
