"""What is read from the ledger, in SQL."""

CURVE = """
    WITH scored AS (
        SELECT COALESCE(g.trained_step, g.step) AS at, COUNT(*) AS num, SUM(s.reward) AS total,
               MIN(s.reward) = MAX(s.reward) AS is_flat,
               SUM(s.served) AS num_served, SUM(CASE WHEN s.served THEN s.reward END) AS served
        FROM groups AS g JOIN siblings AS s USING (group_id)
        WHERE COALESCE(g.trained_step, g.step) IS NOT NULL AND s.reward IS NOT NULL
        GROUP BY g.group_id
    )
    SELECT at, COUNT(*), SUM(total) / SUM(num), SUM(served) / SUM(num_served), SUM(is_flat)
    FROM scored GROUP BY at ORDER BY at
"""
SCORED = """
    SELECT g.group_id, g.task_id, g.question, s.reward
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.state = 'scored' ORDER BY g.received_at, g.group_id, s."index"
"""
ANSWERED = """
    SELECT g.request_json, s.message_json
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.response_id = ? AND g.app_key IS ? AND s.served AND s.message_json IS NOT NULL
    ORDER BY g.received_at DESC LIMIT 1
"""
LATEST = """
    SELECT group_id FROM groups AS g
    WHERE 2 <= (SELECT COUNT(*) FROM siblings AS s
                WHERE s.group_id = g.group_id AND s.message_json IS NOT NULL)
    ORDER BY received_at DESC LIMIT 1
"""
